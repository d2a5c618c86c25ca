"""The command ``scissorhands eval``."""

import importlib
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from scissorhands.budget import BudgetRequest
from scissorhands.errors import InvalidRequestError, ScissorhandsError
from scissorhands.evaluation.results import Cell
from scissorhands.evaluation.table import table
from scissorhands.evaluation.texts import read_text
from scissorhands.policies import get_policy, policy_names

# Sequences and tokens of each.
_NORMAL = (8, 2048)
_QUICK = (2, 512)
# The other codecs store what was evicted; none of them is resident yet.
_CODECS = ("none",)
# Columns of the table where no terminal sets them.
_PIPED_WIDTH = 120


@click.group("eval")
def evaluate() -> None:
    """Measure what a budget costs."""


@evaluate.command("perplexity")
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option(
    "--text",
    "texts",
    required=True,
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text that the sequences are cut from; repeatable, then they share the sequences.",
)
@click.option("--policy", "policies", multiple=True, default=["scissorhands"], show_default=True, help="Repeatable.")
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    type=float,
    default=[0.2],
    show_default=True,
    help="Share of a sequence's length, above 0 and at most 1; repeatable.",
)
@click.option(
    "--codec", "codecs", multiple=True, default=["none"], show_default=True, help="How resident slots are stored."
)
@click.option("--sequences", type=click.IntRange(min=1), help=f"Sequences over all texts.  [default: {_NORMAL[0]}]")
@click.option("--length", type=click.IntRange(min=8), help=f"Tokens of each sequence.  [default: {_NORMAL[1]}]")
@click.option("--quick", is_flag=True, help=f"{_QUICK[0]} sequences of {_QUICK[1]}, unless given: a first look.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write here, and resume from it.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto: float32 on the CPU, else the model's own.",
)
@click.option("--device", default="auto", show_default=True, help="A torch device.")
def perplexity(
    *,
    model: str,
    texts: tuple[Path, ...],
    policies: tuple[str, ...],
    budgets: tuple[float, ...],
    codecs: tuple[str, ...],
    sequences: int | None,
    length: int | None,
    quick: bool,
    out: Path | None,
    dtype: str,
    device: str,
) -> None:
    """Teacher-forced perplexity under each policy and budget, against the full cache."""
    default_sequences, default_length = _QUICK if quick else _NORMAL
    try:
        cells = _cells(policies, codecs, budgets)
        asked: dict[str, Any] = {
            "model": model,
            "texts": [read_text(path) for path in texts],
            "cells": cells,
            "sequences": sequences or default_sequences,
            "length": length or default_length,
            "dtype": dtype,
            "device": device,
            "out": _checked(out),
        }
        runner = _runner()
        results = runner.run(runner.Request(**asked), Console(stderr=True))
    except InvalidRequestError as error:
        # The first part of a field is the option's name, such as of policy.preset.
        option = error.field.partition(".")[0]
        raise click.BadParameter(error.description, param_hint=f"--{option}") from error
    except ScissorhandsError as error:
        raise click.ClickException(str(error)) from error
    rows = [row for cell in cells if (row := results.row_of(cell)) is not None]
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(table(results, rows))


def _cells(policies: tuple[str, ...], codecs: tuple[str, ...], budgets: tuple[float, ...]) -> list[Cell]:
    """Return every combination once, in the order given."""
    for codec in codecs:
        if codec not in _CODECS:
            raise InvalidRequestError("codec", f"{codec!r} cannot be resident; allowed: {', '.join(_CODECS)}")
    for budget in budgets:
        BudgetRequest.fraction(budget)
    labels = [_label(policy) for policy in policies]
    combinations = [Cell(label, codec, budget) for label in labels for codec in codecs for budget in budgets]
    return list(dict.fromkeys(combinations))


def _checked(out: Path | None) -> Path | None:
    """Return the path if it can be written; measuring takes minutes, so this is found out before."""
    if out and not out.absolute().parent.is_dir():
        raise InvalidRequestError("json", f"there is no folder {out.absolute().parent}")
    return out


def _label(policy: str) -> str:
    """Return a policy's name as it is listed; raises for one that there is not."""
    name, _, preset = policy.partition(":")
    try:
        found = get_policy(name, preset)
    except InvalidRequestError as error:
        allowed = ", ".join(policy_names())
        raise InvalidRequestError("policy", f"there is no {policy!r}; allowed: {allowed}") from error
    return found.name if found.preset == "default" else f"{found.name}:{found.preset}"


def _runner() -> Any:
    # Torch takes seconds to import; looking at the help or a wrong option must not.
    try:
        return importlib.import_module("scissorhands.evaluation.run")
    except ModuleNotFoundError as error:
        message = f"eval needs the module {error.name}: pip install 'scissorhands[torch]'"
        raise click.ClickException(message) from error
