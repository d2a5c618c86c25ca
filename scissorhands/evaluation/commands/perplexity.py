"""``scissorhands eval perplexity``."""

from dataclasses import asdict

import click
from rich.console import Console

from scissorhands.evaluation.commands.options import Sizes, evaluation_options, output_console, work
from scissorhands.evaluation.request import Request
from scissorhands.evaluation.table import table


@click.command("perplexity")
@evaluation_options(normal=Sizes(8, 2048), quick_sizes=Sizes(2, 512))
def command(request: Request) -> None:
    """Teacher-forced perplexity under each policy and budget, against the full cache."""
    results = work("perplexity_run").run(request, Console(stderr=True))
    rows = [row for choice in request.choices if (row := results.row_of(asdict(choice))) is not None]
    output_console().print(table(results, rows))
