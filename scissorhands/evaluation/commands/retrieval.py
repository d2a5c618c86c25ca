"""What ``scissorhands eval passkey`` and ``scissorhands eval needle`` share."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import click
from rich.console import Console

from scissorhands.commands import writable
from scissorhands.evaluation.commands.options import Sizes, evaluation_options, markdown_option, plot_option, show, work
from scissorhands.evaluation.request import FULL, Request
from scissorhands.evaluation.results import Row
from scissorhands.evaluation.table import Table

_POSITIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_QUICK_POSITIONS = (0.0, 0.5, 1.0)


def retrieval_command(kind: str, summary: str) -> click.Command:
    """Return the command that hides facts of a kind and asks for them.

    Args:
        kind: One of :data:`scissorhands.evaluation.retrieval.KINDS`.
        summary: The first line of the help.
    """

    @markdown_option
    @plot_option
    @click.option(
        "--recall",
        type=click.FloatRange(0, 1, min_open=True),
        help="Measure every budget with recall, too: at the end of the prompt at most this share of a head's slots is "
        "swapped for evicted ones that the last tokens ask for.",
    )
    @click.option(
        "--recall-every",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Recall again after so many tokens of the answer; 0: not again.",
    )
    @click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the facts.")
    @click.option(
        "--position",
        "positions",
        multiple=True,
        type=click.FloatRange(0, 1),
        help=f"Share of the text before the fact; repeatable.  [default: {', '.join(f'{p:g}' for p in _POSITIONS)}]",
    )
    @evaluation_options(
        normal=Sizes(4, 2048, (512, 1024)), quick_sizes=Sizes(2, 512), several_lengths=True, default_budgets=(0.5, 0.2)
    )
    def command(
        request: Request,
        lengths: tuple[int, ...],
        positions: tuple[float, ...],
        seed: int,
        recall: float | None,
        recall_every: int,
        markdown: Path | None,
        plot: Path | None,
    ) -> None:
        writable(markdown, "markdown")
        drawn = "recall_plot" if recall else "heatmap"
        if writable(plot, "plot"):
            work(drawn)
        how = work("recalling").Recall(recall, every=recall_every) if recall else None
        places = tuple(dict.fromkeys(positions or (_QUICK_POSITIONS if request.quick else _POSITIONS)))
        results = work("retrieval_run").run(request, kind, lengths, places, seed, Console(stderr=True), how)
        chosen = {(choice.policy, choice.codec, choice.budget) for choice in (FULL, *request.choices)}
        rows = [
            row
            for row in results.rows
            if row["length"] in lengths
            and row["position"] in places
            and (row["policy"], row["codec"], row["budget"]) in chosen
            and row["recall"] in (None, how and how.key())
        ]
        show(_table(rows), markdown)
        if plot:
            work(drawn).plot(rows, kind, plot)

    help_text = f"""{summary}

    A fact is hidden in text cut from the files, at each length and position, and asked for at the end, in the model's
    chat template if it has one. The prompt is read as a worker reads it. Beside each row stands what the full cache
    finds of the same facts: what it does not find, no budget is to blame for.
    """
    return click.command(kind, help=help_text)(command)


def _table(rows: Iterable[Row]) -> Table:
    headings = ("Policy", "Budget", "Tokens", "Position", "Compression", "Recall", "Found", "With the full cache")
    return Table(
        headings,
        [
            (
                row["policy"],
                f"{row['budget']:g}{' (raised)' if row['raised'] else ''}",
                str(row["length"]),
                f"{row['position']:g}",
                f"{row['compression']:.2f}x",
                _recall_text(row["recall"]),
                f"{row['found']} of {row['trials']}",
                f"{row['full_success']:.0%}",
            )
            for row in rows
        ],
    )


def _recall_text(recall: Mapping[str, float] | None) -> str:
    if recall is None:
        return "no"
    again = f", every {recall['every']} tokens" if recall["every"] else ""
    return f"{recall['share']:g}{again}"
