"""Options that the subcommands of ``eval`` share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from scissorhands import commands
from scissorhands.commands import click_errors, writable
from scissorhands.evaluation.request import Request, choices
from scissorhands.evaluation.table import Table
from scissorhands.evaluation.texts import read_text

# Columns of a table where no terminal sets them.
_PIPED_WIDTH = 160

Command = Callable[..., None]

# Options of every command that loads a model, or cuts texts for it.
model_option = click.option("--model", required=True, help="A folder or a hub id.")
texts_option = click.option(
    "--text",
    "texts",
    required=True,
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text that the sequences are cut from; repeatable, then they share the sequences.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto: float32 on the CPU, else the model's own.",
)
device_option = click.option("--device", default="auto", show_default=True, help="A torch device.")


class Sizes(NamedTuple):
    """How much is measured: sequences, tokens of each, and shorter lengths where a command takes several."""

    sequences: int
    length: int
    shorter: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths, ascending."""
        return *self.shorter, self.length


def evaluation_options(
    normal: Sizes,
    quick_sizes: Sizes,
    default_budgets: tuple[float, ...] = (0.2,),
    beside_policies: tuple[str, ...] = (),
    several_lengths: bool = False,
) -> Callable[[Command], Command]:
    """Give a command the options that all measurements share.

    The command is called with a :class:`~scissorhands.evaluation.request.Request` besides its own options;
    our errors become click's.

    Args:
        normal: Sizes unless given.
        quick_sizes: Sizes with ``--quick`` unless given.
        default_budgets: Shares of the length unless given.
        beside_policies: What ``--policy`` takes beside the policies.
        several_lengths: Whether ``--length`` is repeatable. The request then holds the longest, and the command is also
            called with ``lengths``.
    """
    options = [
        model_option,
        texts_option,
        click.option(
            "--policy", "policies", multiple=True, default=["scissorhands"], show_default=True, help="Repeatable."
        ),
        click.option(
            "--budget",
            "budgets",
            multiple=True,
            type=float,
            default=default_budgets,
            show_default=True,
            help="Share of a sequence's length, above 0 and at most 1; repeatable.",
        ),
        click.option(
            "--compression",
            "compressions",
            multiple=True,
            type=float,
            help="Instead of --budget: how many times smaller than a full cache in 16 bits, all bytes counted; "
            "repeatable.",
        ),
        click.option(
            "--codec",
            "codecs",
            multiple=True,
            default=["none"],
            show_default=True,
            help="How resident slots are stored, such as turboquant:k4v3, or 'planned': bits of each KV head as the "
            "profile advises; repeatable.",
        ),
        click.option(
            "--sequences", type=click.IntRange(min=1), help=f"Sequences over all texts.  [default: {normal.sequences}]"
        ),
        click.option(
            "--length",
            multiple=several_lengths,
            type=click.IntRange(min=8),
            help=f"Tokens of each sequence{'; repeatable' if several_lengths else ''}."
            f"  [default: {_listed(normal.lengths)}]",
        ),
        click.option(
            "--quick",
            is_flag=True,
            help=f"{quick_sizes.sequences} sequences of {_listed(quick_sizes.lengths)}, unless given: a first look.",
        ),
        click.option(
            "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write here, and resume from it."
        ),
        dtype_option,
        device_option,
        click.option(
            "--profile",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="What eviction costs in the model's heads, as `calibrate` wrote it.  [default: that of the model's "
            "folder, if any]",
        ),
    ]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def called(
            *,
            model: str,
            texts: tuple[Path, ...],
            policies: tuple[str, ...],
            codecs: tuple[str, ...],
            budgets: tuple[float, ...],
            compressions: tuple[float, ...],
            sequences: int | None,
            length: int | tuple[int, ...] | None,
            quick: bool,
            out: Path | None,
            dtype: str,
            device: str,
            profile: Path | None,
            **own: Any,
        ) -> None:
            sizes = quick_sizes if quick else normal
            given = length if isinstance(length, tuple) else (length or sizes.length,)
            lengths = tuple(dict.fromkeys(given or sizes.lengths))
            if several_lengths:
                own["lengths"] = lengths
            # The default is for those who ask for neither.
            source = click.get_current_context().get_parameter_source("budgets")
            asked = () if compressions and source is click.core.ParameterSource.DEFAULT else budgets
            with click_errors():
                request = Request(
                    model=model,
                    choices=choices(policies, codecs, asked, beside_policies, compressions),
                    texts=tuple(read_text(path) for path in texts),
                    sequences=sequences or sizes.sequences,
                    length=max(lengths),
                    quick=quick,
                    dtype=dtype,
                    device=device,
                    out=writable(out, "json"),
                    profile=profile,
                )
                command(request=request, **own)

        decorated: Command = called
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def markdown_option(command: Command) -> Command:
    """Give a command the option ``--markdown``."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--markdown", type=path, help="Write the table here, as Markdown.")(command)


def plot_option(command: Command) -> Command:
    """Give a command the option ``--plot``."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--plot", type=path, help="Write the plot here, a PNG.")(command)


def work(module: str) -> Any:
    """Return the module of ``scissorhands.evaluation`` that does a command's work, imported only now."""
    return commands.work(f"evaluation.{module}", command="eval", extra="eval")


def plots(path: Path | None) -> None:
    """Find out before anything is measured whether a plot can be written.

    Raises:
        InvalidRequestError: There is no such folder.
        ClickException: A plot is asked for, and matplotlib is not installed.
    """
    if writable(path, "plot"):
        work("plot")


def show(table: Table, markdown: Path | None) -> None:
    """Print a table, wide enough where no terminal sets its width, and write it if that is asked for."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(table.rich())
    if markdown:
        markdown.write_text(table.markdown(), encoding="utf-8")
