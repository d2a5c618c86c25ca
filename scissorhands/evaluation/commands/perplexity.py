"""``scissorhands eval perplexity``."""

from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from scissorhands.evaluation.commands.options import Sizes, evaluation_options, table_options, work
from scissorhands.evaluation.commands.report import check_outputs, show
from scissorhands.evaluation.report import entries
from scissorhands.evaluation.request import ORACLES, Request


@click.command("perplexity")
@evaluation_options(normal=Sizes(8, 2048), quick_sizes=Sizes(2, 512), beside_policies=ORACLES)
@table_options
def command(request: Request, markdown: Path | None, plot: Path | None) -> None:
    """Teacher-forced perplexity under each policy and budget, against the full cache."""
    check_outputs(markdown, plot)
    results = work("perplexity_run").run(request, Console(stderr=True))
    rows = [row for choice in request.choices if (row := results.row_of(asdict(choice))) is not None]
    show(entries([replace(results, rows=rows)]), results.full, markdown, plot)
