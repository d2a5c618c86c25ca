"""``scissorhands eval oracle``."""

from pathlib import Path

import click
from rich.console import Console

from scissorhands.commands import writable
from scissorhands.evaluation.commands.options import (
    Sizes,
    evaluation_options,
    markdown_option,
    plot_option,
    plots,
    show,
    work,
)
from scissorhands.evaluation.request import ORACLE, ORACLES, Request
from scissorhands.evaluation.results import Row
from scissorhands.evaluation.table import Table


@click.command("oracle")
@evaluation_options(normal=Sizes(4, 2048), quick_sizes=Sizes(2, 512), beside_policies=ORACLES)
@markdown_option
@plot_option
def command(request: Request, markdown: Path | None, plot: Path | None) -> None:
    """How far a policy is from knowing the future.

    Of the attention that the full cache gives after the first eviction, the share that falls on tokens which the policy
    has evicted by then, in every layer and KV head; beside it what a clairvoyant with the same budget loses, which
    keeps the tokens that later queries will attend to most. The plot is a heat map.
    """
    writable(markdown, "markdown")
    plots(plot)
    runner = work("oracle_run")
    results = runner.run(request, Console(stderr=True))
    rows = [results.row_of(choice.key()) for choice in runner.with_oracle(request.choices)]
    show(_table(rows), markdown)
    if plot:
        work("oracle_plot").plot_lost(rows, plot)


def _table(rows: list[Row]) -> Table:
    """Return what each row loses, and how many times what the oracle of its budget loses."""
    headings = ("Policy", "Budget", "Slots", "Attention lost", "Times the oracle's", "Best head", "Worst head")
    floors = {row["budget"]: row["lost_percent"] for row in rows if row["policy"] == ORACLE}
    lines = []
    for row in sorted(rows, key=lambda row: (-row["budget"], row["lost_percent"])):
        heads = [share for layer in row["lost_percent_by_head"] for share in layer]
        floor = floors[row["budget"]]
        lines.append(
            (
                row["policy"],
                f"{row['budget']:g}{' (raised)' if row['raised'] else ''}",
                str(row["slots"]),
                f"{row['lost_percent']:.2f} %",
                f"{row['lost_percent'] / floor:.2f}" if floor else "",
                f"{min(heads):.2f} %",
                f"{max(heads):.2f} %",
            )
        )
    return Table(headings, lines)
