"""``scissorhands eval report``."""

from pathlib import Path

import click

from scissorhands.evaluation.commands.options import click_errors, output_console, table_options, work, writable
from scissorhands.evaluation.report import Entry, entries, perplexity_table, read_files
from scissorhands.evaluation.results import Row


@click.command("report")
@click.argument(
    "files",
    metavar="JSON...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@table_options
def command(files: tuple[Path, ...], markdown: Path | None, plot: Path | None) -> None:
    """Put files of perplexity into one table and one plot.

    The files must be of the same texts, sequences, length and weights. At each budget, every policy is compared to the
    best in pairs of sequences: a difference whose 95 % interval holds zero is within noise.
    """
    with click_errors():
        check_outputs(markdown, plot)
        found = read_files(files)
        show(entries(found), found[0].full, markdown, plot)


def check_outputs(markdown: Path | None, plot: Path | None) -> None:
    """Find out before anything is measured whether it can be written.

    Raises:
        InvalidRequestError: There is no such folder.
        ClickException: A plot is asked for, and matplotlib is not installed.
    """
    writable(markdown, "markdown")
    if writable(plot, "plot"):
        work("plot")


def show(found: list[Entry], full: Row, markdown: Path | None, plot: Path | None) -> None:
    """Print the table, and write what is asked for."""
    table = perplexity_table(found, full)
    output_console().print(table.rich())
    if markdown:
        markdown.write_text(table.markdown(), encoding="utf-8")
    if plot:
        work("plot").plot_perplexity(found, plot)
