"""``scissorhands eval report``."""

from pathlib import Path

import click

from scissorhands.commands import click_errors, writable
from scissorhands.evaluation.commands.options import markdown_option, plot_option, plots, show, work
from scissorhands.evaluation.report import entries, perplexity_table, read_files


@click.command("report")
@click.argument(
    "files",
    metavar="JSON...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@markdown_option
@plot_option
def command(files: tuple[Path, ...], markdown: Path | None, plot: Path | None) -> None:
    """Put files of perplexity into one table and one plot.

    The files must be of the same texts, sequences, length and weights. At each budget, every policy is compared to the
    best in pairs of sequences: a difference whose 95 % interval holds zero is within noise.
    """
    with click_errors():
        writable(markdown, "markdown")
        plots(plot)
        results = read_files(files)
        found = entries(results)
        show(perplexity_table(found, results[0].full), markdown)
        if plot:
            work("plot").plot_perplexity(found, plot)
