"""The plot of what a budget costs. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, SymmetricalLogLocator

from scissorhands.evaluation.report import Entry

_PANELS = (
    ("All positions", "increase_percent", "ci95"),
    ("Positions after the first eviction", "increase_percent_after_eviction", "ci95_after_eviction"),
)
_MARKERS = "osD^vP*X<>hp"
# The ten strong colors, then the ten pale ones.
_COLORS = [mpl.colormaps["tab20"](index) for index in (*range(0, 20, 2), *range(1, 20, 2))]
_MIB = 2**20
# Below this many percent the axis is linear, above it logarithmic: policies differ by factors.
_LINEAR_PERCENT = 1.0
_TICKS = (1, 2, 5)


def plot_perplexity(entries: Sequence[Entry], path: Path) -> None:
    """Draw the increase of perplexity against all bytes of a sequence, a line for each policy; writes a PNG."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharex=True, sharey=True)
    for axes, (title, field, interval) in zip(panels, _PANELS, strict=True):
        _panel(axes, title, entries, field, interval)
    panels[0].set_ylabel("Perplexity above the full cache's, %  (95 % intervals over sequences)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=130)


def _panel(axes: Axes, title: str, entries: Sequence[Entry], field: str, interval: str) -> None:
    names = dict.fromkeys(entry.name for entry in sorted(entries, key=lambda entry: entry.source))
    for index, name in enumerate(names):
        of_name = [entry for entry in entries if entry.name == name and entry.row[field] is not None]
        rows = sorted((entry.row for entry in of_name), key=lambda row: int(row["bytes_16_bit"]))
        style: dict[str, Any] = {"linestyle": "-", "linewidth": 1.3, "color": _COLORS[index % len(_COLORS)]}
        if of_name and of_name[0].clairvoyant:
            style = {"linestyle": ":", "linewidth": 2.0, "color": "black"}
        elif of_name and of_name[0].source:
            style["linestyle"] = "--"
        middle = [row[field] for row in rows]
        ends = [row[interval] or (row[field], row[field]) for row in rows]
        axes.errorbar(
            [row["bytes_16_bit"] / _MIB for row in rows],
            middle,
            yerr=[
                [max(0.0, value - low) for value, (low, _) in zip(middle, ends, strict=True)],
                [max(0.0, high - value) for value, (_, high) in zip(middle, ends, strict=True)],
            ],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            capsize=2,
            elinewidth=0.6,
            label=name,
            **style,
        )
    axes.set_title(title)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.xaxis.set_major_locator(LogLocator(subs=_TICKS))
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=_LINEAR_PERCENT, subs=_TICKS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("MiB of a sequence: keys and values in 16 bits, positions, evidence")
    axes.grid(alpha=0.3, which="both")
