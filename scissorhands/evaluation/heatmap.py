"""The heat map of retrieval: a panel for each policy and budget, lengths across, places down. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scissorhands.evaluation.results import Row

_COLORS = mpl.colormaps["RdYlGn"]
# The ends of the colors are too dark for figures to be read on them.
_PALER = 0.3


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the share of facts found; writes a PNG.

    Args:
        rows: The rows.
        title: What was hidden.
        path: The file.
    """
    panels = list(dict.fromkeys((row["policy"], row["budget"]) for row in rows))
    lengths = sorted({row["length"] for row in rows})
    positions = sorted({row["position"] for row in rows})
    size = (1.2 + len(panels) * (0.8 + 0.7 * len(lengths)), 1.4 + 0.55 * len(positions))
    figure = Figure(figsize=size, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for each, (policy, budget) in zip(axes, panels, strict=True):
        of_panel = [row for row in rows if (row["policy"], row["budget"]) == (policy, budget)]
        _panel(each, of_panel, lengths, positions)
        each.set_title(f"{policy}\n{'all tokens' if budget == 1 else f'{budget:g} of the tokens'}", fontsize="small")
    axes[0].set_ylabel("share of the text before it")
    figure.supxlabel("tokens", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=130)


def _panel(axes: Axes, rows: Sequence[Row], lengths: Sequence[int], positions: Sequence[float]) -> None:
    shares = np.full((len(positions), len(lengths)), np.nan)
    for row in rows:
        place = positions.index(row["position"]), lengths.index(row["length"])
        shares[place] = row["success"]
        axes.text(place[1], place[0], f"{row['found']}/{row['trials']}", ha="center", va="center", fontsize="small")
    axes.imshow(shares, cmap=_COLORS, vmin=-_PALER, vmax=1 + _PALER, aspect="auto")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(positions)), [f"{position:g}" for position in positions])
