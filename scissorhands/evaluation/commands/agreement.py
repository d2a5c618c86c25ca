"""``scissorhands eval agreement``."""

from pathlib import Path

import click
from rich.console import Console

from scissorhands.commands import writable
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.commands.options import Sizes, evaluation_options, markdown_option, show, work
from scissorhands.evaluation.request import Request
from scissorhands.evaluation.results import Row
from scissorhands.evaluation.table import Table

_NEW_TOKENS = 128
_QUICK_NEW_TOKENS = 32


@click.command("agreement")
@evaluation_options(normal=Sizes(8, 1024), quick_sizes=Sizes(2, 256))
@click.option(
    "--new-tokens",
    type=click.IntRange(min=1),
    help=f"Tokens of each answer, of the length.  [default: {_NEW_TOKENS}, quick {_QUICK_NEW_TOKENS}]",
)
@markdown_option
def command(request: Request, new_tokens: int | None, markdown: Path | None) -> None:
    """Compare greedy answers to those of the full cache.

    Prompts are cut from the texts and read as a worker reads them. The divergence and the share of same choices are
    taken along the full cache's answer, the share of equal tokens and the first divergence from the budget's own.
    """
    writable(markdown, "markdown")
    asked = new_tokens or (_QUICK_NEW_TOKENS if request.quick else _NEW_TOKENS)
    if asked >= request.length:
        raise InvalidRequestError("new-tokens", f"must be below the length ({request.length}), got {asked}")
    results = work("agreement_run").run(request, asked, Console(stderr=True))
    rows = [row for choice in request.choices if (row := results.row_of(choice.key())) is not None]
    show(_table(rows, asked), markdown)


def _table(rows: list[Row], new_tokens: int) -> Table:
    headings = (
        "Policy", "Budget", "Compression", "Divergence, nats", "95 % interval", "Same choice", "Equal tokens",
        f"First divergence, of {new_tokens}", "Never",
    )  # fmt: skip
    return Table(headings, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    interval = row["kl_nats_ci95"]
    return (
        row["policy"],
        f"{row['budget']:g}{' (raised)' if row['raised'] else ''}",
        f"{row['compression']:.2f}x",
        f"{row['kl_nats']:.4f}",
        f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "",
        f"{row['share_same_choice']:.1%}",
        f"{row['share_equal']:.1%}",
        f"{row['first_divergence_median']:g}",
        f"{row['never_diverged']} of {len(row['first_divergence'])}",
    )
