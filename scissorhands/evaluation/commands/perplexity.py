"""``scissorhands eval perplexity``."""

from dataclasses import replace
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
from scissorhands.evaluation.report import entries, perplexity_table
from scissorhands.evaluation.request import ORACLES, Request


@click.command("perplexity")
@evaluation_options(normal=Sizes(8, 2048), quick_sizes=Sizes(2, 512), beside_policies=ORACLES)
@markdown_option
@plot_option
def command(request: Request, markdown: Path | None, plot: Path | None) -> None:
    """Teacher-forced perplexity under each policy and budget, against the full cache."""
    writable(markdown, "markdown")
    plots(plot)
    results = work("perplexity_run").run(request, Console(stderr=True))
    rows = [row for choice in request.choices if (row := results.row_of(choice.key())) is not None]
    found = entries([replace(results, rows=rows)])
    show(perplexity_table(found, results.full), markdown)
    if plot:
        work("plot").plot_perplexity(found, plot)
