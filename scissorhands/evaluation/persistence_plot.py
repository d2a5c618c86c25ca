"""The plots of ``eval persistence``. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scissorhands.evaluation.persistence_table import pivotal_to
from scissorhands.evaluation.results import Row


def plot_persistence(rows: Sequence[Row], path: Path) -> None:
    """Draw persistence by layer for each kind of pivotal sets, and below the changes of attention; writes a PNG."""
    measured = [row for row in rows if "sets" in row]
    changes = [row for row in rows if "histogram" in row]
    sets = len(measured[0]["sets"])
    figure = Figure(figsize=(5 * sets, 8.5), layout="constrained")
    # Two rows of panels, of unlike numbers of columns.
    grid = figure.add_gridspec(2, 2 * sets)
    panels = [figure.add_subplot(grid[0, 2 * index : 2 * index + 2]) for index in range(sets)]
    for index, axes in enumerate(panels):
        _persistence(axes, measured, index)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize="small")
    _changes(figure.add_subplot(grid[1, :sets]), changes)
    _dropped(figure.add_subplot(grid[1, sets:]), changes)
    figure.savefig(path, format="png", dpi=130)


def _persistence(axes: Axes, rows: Sequence[Row], index: int) -> None:
    for number, row in enumerate(rows):
        found = row["sets"][index]
        ratio, size = (_by_layer(found[f"{name}_percent_by_head"]) for name in ("ratio", "pivotal"))
        color = f"C{number}"
        axes.plot(ratio, color=color, marker=".", label=f"{row['of']}: persistence ratio")
        axes.plot(size, color=color, linestyle="--", label=f"{row['of']}: pivotal tokens (what chance gives)")
    axes.set_title(f"Pivotal: above average to {pivotal_to(rows[0]['sets'][index]['share'])}")
    _layers(axes)
    axes.set_ylim(0, 102)
    axes.set_ylabel("%")


def _changes(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        counts = np.sum(row["histogram"]["counts_by_layer"], axis=0)
        axes.stairs(100 * counts / max(1, counts.sum()), row["histogram"]["edges"], label=_name(row))
    axes.set_yscale("log")
    axes.set_title("Relative change of attention above average (-1: evicted)")
    axes.set_xlabel("(budget - full) / full; the last bin holds all above")
    axes.set_ylabel("% of pairs of query and token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _dropped(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        axes.plot(np.mean(row["dropped_percent_by_head"], axis=1), marker=".", label=_name(row))
    axes.set_title("Attended to above average, but evicted")
    _layers(axes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("% of pairs of query and token")
    axes.legend(fontsize="small")


def _layers(axes: Axes) -> None:
    axes.set_xlabel("Layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _by_layer(heads: list[list[float | None]]) -> npt.NDArray[np.float64]:
    """Return the mean over the heads of each layer, of those that are known; NaN, a gap, where none is."""
    means: npt.NDArray[np.float64] = np.ma.masked_invalid(np.array(heads, dtype=np.float64)).mean(axis=1).filled(np.nan)
    return means


def _name(row: Row) -> str:
    return f"{row['policy']} {row['budget']:g}"
