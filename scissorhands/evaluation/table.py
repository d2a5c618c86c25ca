"""Tables of results, for a terminal and for a document."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        headings: Of the columns; the first is aligned to the left, figures to the right.
        lines: Of each line, a text for each column.
    """

    headings: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]

    def rich(self) -> RichTable:
        """Return it for a terminal."""
        made = RichTable(box=box.SIMPLE)
        for index, heading in enumerate(self.headings):
            made.add_column(heading, justify="right" if index else "left")
        for line in self.lines:
            made.add_row(*(Text(part) for part in line))
        return made

    def markdown(self) -> str:
        """Return it for a document."""
        rule = ["---", *["--:"] * (len(self.headings) - 1)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (self.headings, rule, *self.lines))


def percent(value: float | None, interval: Sequence[float] | None) -> str:
    """Write a percentage with its interval; nothing for None."""
    if value is None:
        return ""
    return f"{value:+.2f} %" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")
