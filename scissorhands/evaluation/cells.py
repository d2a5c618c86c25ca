"""Measuring cell by cell: what is done is kept, and whoever waits sees how far it is."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scissorhands.evaluation.results import Key, Results, Row

# Told how many more units of a cell's work are done.
Advance = Callable[[int], object]


@dataclass(frozen=True)
class Cell:
    """One row that is to be measured.

    Args:
        label: What it is called while it is measured.
        key: Names the cell; its row starts with these fields.
        grant: All numbers that decide what is kept (:func:`scissorhands.grant.grant_text`). A row that was measured
            under another grant is measured again.
        work: Units of work, such as tokens.
        measure: Returns the other fields of the row.
    """

    label: str
    key: Key
    grant: str
    work: int
    measure: Callable[[Advance], Row]


class Runner:
    """Measures what is missing, writes the file after every cell, and shows how far it is.

    On a terminal it shows a bar for each cell, elsewhere it prints a line when one is done. Use it as a context.

    Args:
        results: What is done already, and where rows are added.
        out: The file; None writes none.
        console: Where progress is shown.
    """

    def __init__(self, results: Results, out: Path | None, console: Console) -> None:
        self._results = results
        self._out = out
        self._console = console
        columns: Sequence[Any] = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def measure_full(self, label: str, work: int, measure: Callable[[Advance], Row]) -> None:
        """Measure the full cache, unless that is done; ``measure`` returns what the file reports of it."""
        if not self._results.full:
            self._results.full = self._timed(label, work, measure)
            self._write()

    def measure(self, cells: Sequence[Cell], describe: Callable[[Row], str] = lambda _: "") -> None:
        """Measure the cells that are not done.

        Args:
            cells: All cells asked for.
            describe: Says the main figure of a row, for the line of progress.
        """
        for cell in cells:
            self._results.forget_others(cell.key, cell.grant)
        missing = [cell for cell in cells if self._results.row_of(cell.key) is None]
        for index, cell in enumerate(missing):
            label = f"[{index + 1}/{len(missing)}] {cell.label}"
            measured = self._timed(label, cell.work, cell.measure, describe)
            self._results.rows.append({**cell.key, "grant": cell.grant, **measured})
            self._write()

    def _timed(
        self,
        label: str,
        work: int,
        measure: Callable[[Advance], Row],
        describe: Callable[[Row], str] = lambda _: "",
    ) -> Row:
        task = self._progress.add_task(label, total=work)
        began = time.monotonic()
        row = measure(lambda done: self._progress.advance(task, done))
        row["seconds"] = round(time.monotonic() - began, 1)
        if not self._console.is_terminal:
            figure = describe(row)
            self._console.print(
                f"{label}: {figure}{', ' if figure else ''}{row['seconds']} s", highlight=False, markup=False
            )
        return row

    def _write(self) -> None:
        if self._out:
            self._results.write(self._out)
