"""Results of an evaluation: a JSON file that is complete after every cell, so that a stopped run can be resumed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scissorhands.errors import InvalidRequestError

Row = dict[str, Any]
# What names a cell: fields that its row repeats, such as policy, codec and budget.
Key = Mapping[str, Any]


@dataclass
class Results:
    """What has been measured under one set of settings.

    Args:
        settings: All that decides the figures; cells of other settings are not mixed in.
        environment: Where they were measured.
        full: What is reported of the full cache; empty until it is measured.
        rows: One for each cell.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    full: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def row_of(self, key: Key) -> Row | None:
        """Return the row of a cell that is done."""
        return next((row for row in self.rows if _answers(row, key)), None)

    def forget_others(self, key: Key, grant: str) -> None:
        """Drop a cell's row if it was measured under another grant: a policy's own numbers may have changed since."""
        self.rows = [row for row in self.rows if not _answers(row, key) or row.get("grant") == grant]

    def resume(self, path: Path, check: Callable[["Results"], object] = lambda _: None) -> list[str]:
        """Take over what a file holds, if it was measured under the same settings.

        Args:
            path: The file; there may be none.
            check: Raises a ValueError, KeyError or TypeError if what was read is not what the command writes.

        Returns:
            The settings that differ; nothing was taken over unless this is empty.

        Raises:
            InvalidRequestError: The file is something else.
        """
        if not path.exists():
            return []
        held = read_results(path)
        different = differing(held.settings, self.settings)
        if not different:
            try:
                check(held)
            except (ValueError, KeyError, TypeError) as error:
                raise _something_else(path) from error
            self.full, self.rows = held.full, held.rows
        return different

    def write(self, path: Path) -> None:
        """Write all of it; a reader sees the old file or the new one, never a part."""
        document = {
            "full": self.full,
            "rows": self.rows,
            "settings": self.settings,
            "environment": self.environment,
        }
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)


def read_results(path: Path) -> Results:
    """Read a file of results.

    Raises:
        InvalidRequestError: The file is something else.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        settings, environment, full = (dict(held[name]) for name in ("settings", "environment", "full"))
        return Results(settings, environment, full, [dict(row) for row in held["rows"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _something_else(path) from error


def differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ."""
    return sorted(name for name in settings.keys() | others.keys() if settings.get(name) != others.get(name))


def _answers(row: Row, key: Key) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def _something_else(path: Path) -> InvalidRequestError:
    return InvalidRequestError("json", f"{path} exists and is not a result of this command; name another file")
