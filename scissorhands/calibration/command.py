"""The command ``scissorhands calibrate``."""

from pathlib import Path

import click
from rich.console import Console

from scissorhands.commands import click_errors, work, writable
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.commands.options import (
    Sizes,
    device_option,
    dtype_option,
    model_option,
    show,
    texts_option,
)
from scissorhands.evaluation.request import Request, choices
from scissorhands.evaluation.texts import read_text
from scissorhands.formats import STATISTICS_FILE
from scissorhands.profile import FILE_NAME

# Budgets that are measured, as shares of the length.
SHARES = (0.05, 0.08, 0.125, 0.1667, 0.2, 0.25, 0.3333, 0.5, 0.7)
_NORMAL = Sizes(3, 2048)
_QUICK = Sizes(2, 512)


@click.command()
@model_option
@texts_option
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    help=f"Sequences over all texts.  [default: {_NORMAL.sequences}, or one of each text]",
)
@click.option(
    "--length",
    type=click.IntRange(min=8),
    help=f"Tokens of each sequence.  [default: {_NORMAL.length}]",
)
@click.option(
    "--policy",
    default="scissorhands:uniform",
    show_default=True,
    metavar="NAME[:PRESET]",
    help="What evicts while it is measured.",
)
@click.option(
    "--quick",
    is_flag=True,
    help=f"{_QUICK.sequences} sequences of {_QUICK.length}, unless given: a first look.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The profile to write.  [default: {FILE_NAME} in the model's folder]",
)
@dtype_option
@device_option
def calibrate(
    *,
    model: str,
    texts: tuple[Path, ...],
    sequences: int | None,
    length: int | None,
    policy: str,
    quick: bool,
    out: Path | None,
    dtype: str,
    device: str,
) -> None:
    """Measure what eviction and fewer bits cost in each KV head of a model.

    The profile that it writes lets budgets be shared between the heads: those that look far back get more slots, and
    the others fewer, within the same bytes. The statistics beside it are what some codecs are fitted to. Once for a
    model is enough.
    """
    sizes = _QUICK if quick else _NORMAL
    with click_errors():
        place = _place(model, out)
        request = Request(
            model=model,
            texts=tuple(read_text(path) for path in texts),
            choices=choices((policy,), ("none",), SHARES),
            sequences=sequences or max(sizes.sequences, len(texts)),
            length=length or sizes.length,
            quick=quick,
            dtype=dtype,
            device=device,
            out=place,
        )
        runner = work("calibration.run", command="calibrate", extra="torch")
        profile, statistics, about = runner.run(request, Console(stderr=True))
    try:
        profile.save(place, about)
        statistics.write(place.with_name(STATISTICS_FILE))
    except OSError as error:
        raise click.ClickException(f"cannot write {place}: {error.strerror}") from error
    show(runner.table(profile), None)
    click.echo(f"{place} and {STATISTICS_FILE} beside it: written", err=True)


def _place(model: str, out: Path | None) -> Path:
    """Return where the profile goes; measuring takes minutes, so that is found out before."""
    if out is None and not Path(model).is_dir():
        raise InvalidRequestError("out", f"name the file to write: {model!r} is no folder that it could be put into")
    place = out or Path(model) / FILE_NAME
    writable(place, "out")
    return place
