"""``scissorhands eval persistence``."""

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
from scissorhands.evaluation.persistence_table import change_table, persistence_table
from scissorhands.evaluation.request import Request


@click.command("persistence")
@evaluation_options(normal=Sizes(4, 2048), quick_sizes=Sizes(2, 512))
@click.option("--random-weights", is_flag=True, help="Also measure the model with weights as before training.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random weights.")
@markdown_option
@plot_option
def command(request: Request, random_weights: bool, seed: int, markdown: Path | None, plot: Path | None) -> None:
    """Whether tokens that mattered keep mattering, and what a budget does to attention.

    The persistence ratio of the paper (arXiv 2305.17118) per layer and KV head: of the tokens that are pivotal in the
    later half of a text, the share that were pivotal in the earlier. Then, for each policy and budget, the relative
    change of each query's attention to the tokens that the full cache attends to above average.
    """
    writable(markdown, "markdown")
    plots(plot)
    runner = work("persistence_run")
    results = runner.run(request, Console(stderr=True), random_weights=random_weights, seed=seed)
    rows = [results.row_of(key) for key in runner.keys(request, random_weights=random_weights)]
    tables = (persistence_table(rows), change_table(rows))
    for table in tables:
        show(table, None)
    if markdown:
        markdown.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    if plot:
        work("persistence_plot").plot_persistence(rows, plot)
