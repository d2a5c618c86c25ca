"""The heat maps of ``eval oracle``. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scissorhands.evaluation.results import Row


def plot_lost(rows: Sequence[Row], path: Path) -> None:
    """Draw the attention that each row loses by layer and head, a map for each, on one scale; writes a PNG."""
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    columns = max(sum(row["budget"] == budget for row in rows) for budget in budgets)
    figure = Figure(figsize=(2 + 2.2 * columns, 1 + 4.5 * len(budgets)), layout="constrained")
    grid = figure.subplots(len(budgets), columns, squeeze=False)
    most = max(share for row in rows for layer in row["lost_percent_by_head"] for share in layer)
    for budget, line in zip(budgets, grid, strict=True):
        of_budget = sorted((row for row in rows if row["budget"] == budget), key=lambda row: float(row["lost_percent"]))
        for axes in line[len(of_budget) :]:
            axes.set_axis_off()
        for row, axes in zip(of_budget, line, strict=False):
            image = axes.imshow(row["lost_percent_by_head"], aspect="auto", cmap="magma", vmin=0, vmax=most)
            axes.set_title(f"{row['policy']}\n{row['budget']:g}: {row['lost_percent']:.1f} %", fontsize="medium")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("KV head")
        line[0].set_ylabel("Layer")
    figure.colorbar(image, ax=grid, label="Attention to evicted tokens, % of the full cache's", shrink=0.6)
    figure.savefig(path, format="png", dpi=130)
