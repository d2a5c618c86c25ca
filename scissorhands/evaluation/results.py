"""Results of an evaluation: a JSON file that is complete after every cell, so that a stopped run can be resumed."""

import base64
import binascii
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.statistics import Losses, perplexity

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One combination that is measured.

    Args:
        policy: ``name`` or ``name:preset``.
        codec: How resident slots are stored.
        budget: Share of the sequence's length.
    """

    policy: str
    codec: str
    budget: float

    def answers(self, row: Row) -> bool:
        """Whether ``row`` is of this cell."""
        return (row.get("policy"), row.get("codec"), row.get("budget")) == (self.policy, self.codec, self.budget)


@dataclass
class Results:
    """What has been measured under one set of settings.

    Args:
        settings: All that decides the figures; cells of other settings are not mixed in.
        environment: Where they were measured.
        full: Losses of the full cache, ``[sequences, length - 1]`` in nats.
        rows: One for each cell.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    full: Losses | None = None
    rows: list[Row] = field(default_factory=list)

    def row_of(self, cell: Cell) -> Row | None:
        """Return the row of a cell that is done."""
        return next((row for row in self.rows if cell.answers(row)), None)

    def forget_others(self, cell: Cell, grant: str) -> None:
        """Drop a cell's row if it was measured under another grant: a policy's own numbers may have changed since."""
        self.rows = [row for row in self.rows if not cell.answers(row) or row.get("grant") == grant]

    def resume(self, path: Path) -> list[str]:
        """Take over what a file holds, if it was measured under the same settings.

        Returns:
            The settings that differ; nothing was taken over unless this is empty.

        Raises:
            InvalidRequestError: The file is something else.
        """
        if not path.exists():
            return []
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            settings, rows, losses = held["settings"], held["rows"], held["full"]["losses"]
            different = sorted(
                name for name in settings.keys() | self.settings if settings.get(name) != self.settings.get(name)
            )
            if different:
                return different
            shape = (self.settings["sequences"], self.settings["length"] - 1)
            full = np.frombuffer(base64.b64decode(losses, validate=True), dtype="<f4").reshape(shape)
            self.full, self.rows = full, [dict(row) for row in rows]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise InvalidRequestError(
                "json", f"{path} exists and is not a result of this command; name another file"
            ) from error
        return []

    def write(self, path: Path) -> None:
        """Write all of it; a reader sees the old file or the new one, never a part."""
        assert self.full is not None
        document = {
            "full": {
                "perplexity": perplexity(self.full),
                # Little-endian float32 [sequences, length - 1]: later cells are compared to it.
                "losses": base64.b64encode(self.full.astype("<f4").tobytes()).decode("ascii"),
            },
            "rows": self.rows,
            "settings": self.settings,
            "environment": self.environment,
        }
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)
