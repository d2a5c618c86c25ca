"""``scissorhands advise``."""

import click
from rich.console import Console

from scissorhands.evaluation.advice import Advice, paste
from scissorhands.evaluation.commands.options import Sizes, evaluation_options, show, work
from scissorhands.evaluation.request import Request
from scissorhands.evaluation.table import Table

# Candidates: about a quarter apart, so that bisection takes four measurements.
BUDGETS = (0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@click.command("advise")
@evaluation_options(normal=Sizes(8, 2048), quick_sizes=Sizes(4, 512), default_budgets=BUDGETS)
@click.option(
    "--loss",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="PERCENT",
    help="Loss that is allowed, in percent of the perplexity after the first eviction.",
)
def command(request: Request, loss: float) -> None:
    """Find the smallest budget that your own text allows.

    The text is read under some of the budgets, chosen by bisection, and compared to the full cache. Sequences should be
    as long as your prompts and answers together, and of the same kind of text.
    """
    found: list[Advice] = work("advise_run").run(request, loss, Console(stderr=True))
    show(Table(found[0].table().headings, [line for advice in found for line in advice.table().lines]), None)
    for advice in found:
        click.echo("\n".join(advice.lines()) + "\n")
    best = [advice.best for advice in found if advice.best is not None]
    if best:
        smallest = min(best, key=lambda row: row["bytes_per_sequence"])
        click.echo("To use it:\n" + "\n".join(f"    {line}" for line in paste(smallest)))
