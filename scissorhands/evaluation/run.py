"""Running ``eval perplexity``: the full cache first, then cell by cell."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from scissorhands import __version__
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation import statistics
from scissorhands.evaluation.loading import load, weights_digest
from scissorhands.evaluation.perplexity import Measured, measure
from scissorhands.evaluation.results import Cell, Results, Row
from scissorhands.evaluation.statistics import Losses
from scissorhands.evaluation.texts import Text, Tokens, sequences_of
from scissorhands.grant import PolicyRequest, grant, grant_text
from scissorhands.probe import model_shape

_HALF_BYTES = 2


@dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        model: A folder or a hub id.
        texts: Where the sequences come from.
        cells: What to compare to the full cache.
        sequences: Sequences over all texts.
        length: Tokens of each.
        dtype: As in :func:`scissorhands.evaluation.loading.load`.
        device: As in :func:`scissorhands.evaluation.loading.load`.
        out: Where the results are written and resumed from; None: nowhere.
    """

    model: str
    texts: list[Text]
    cells: list[Cell]
    sequences: int
    length: int
    dtype: str
    device: str
    out: Path | None


def run(request: Request, console: Console) -> Results:
    """Measure what is asked for and not yet done; ``console`` shows how far it is.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
        EngineError: The model's losses are not finite.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = load(request.model, request.dtype, request.device)
    _check_length(model, request.length)
    grants = {cell: _grant(cell, model, request.length) for cell in request.cells}
    tokens = sequences_of(request.texts, tokenizer, request.sequences, request.length)
    results = Results(_settings(request, model), _environment(model))
    if request.out and (different := results.resume(request.out)):
        console.print(f"{request.out} is of other settings ({', '.join(different)}): measuring anew")
    for cell, granted in grants.items():
        results.forget_others(cell, grant_text(granted))
    missing = [cell for cell in request.cells if results.row_of(cell) is None]
    with _progress(console) as progress:
        if results.full is None:
            full = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), model_shape(model), request.length)
            results.full = _measure(model, full, tokens, progress, "full cache").losses
            _write(results, request.out)
        for cell in missing:
            measured = _measure(model, grants[cell], tokens, progress, f"{cell.policy} {cell.budget:g}")
            results.rows.append(_row(cell, grants[cell], measured, results.full, model))
            _write(results, request.out)
    return results


def _grant(cell: Cell, model: PreTrainedModel, length: int) -> Grant:
    name, _, preset = cell.policy.partition(":")
    return grant(BudgetRequest.fraction(cell.budget), PolicyRequest(name, preset), model_shape(model), length)


def _measure(model: PreTrainedModel, granted: Grant, tokens: Tokens, progress: Progress, label: str) -> Measured:
    task = progress.add_task(label, total=tokens.shape[0] * (tokens.shape[1] - 1))
    return measure(model, granted, tokens, lambda done: progress.advance(task, done))


def _row(cell: Cell, granted: Grant, measured: Measured, full: Losses, model: PreTrainedModel) -> Row:
    losses, first = measured.losses, measured.first_eviction
    # The full cache would hold the last token too, if it were fed; a row that evicts is no smaller without it.
    full_bytes = model_shape(model).full_bytes(losses.shape[1] + 1, _HALF_BYTES)
    return {
        "policy": cell.policy,
        "codec": cell.codec,
        "budget": cell.budget,
        "grant": grant_text(granted),
        "slots": granted.layer_slots[0],
        "raised": granted.raised,
        "bytes": measured.bytes_per_sequence,
        "compression": full_bytes / measured.bytes_per_sequence,
        "perplexity": statistics.perplexity(losses),
        "increase_percent": statistics.increase_percent(losses, full),
        "ci95": statistics.interval_percent(losses, full),
        "first_eviction": first,
        "increase_percent_after_eviction": (
            None if first is None else statistics.increase_percent(losses[:, first:], full[:, first:])
        ),
        "ci95_after_eviction": (
            None if first is None else statistics.interval_percent(losses[:, first:], full[:, first:])
        ),
        "seconds": round(measured.seconds, 1),
    }


def _check_length(model: PreTrainedModel, length: int) -> None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and length > most:
        raise InvalidRequestError("length", f"must be at most {most}, the model's longest context, got {length}")


def _settings(request: Request, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "model": request.model,
        "weights_sha256": weights_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "texts": [{"name": text.name, "sha256": text.sha256} for text in request.texts],
        "sequences": request.sequences,
        "length": request.length,
        "bootstrap": {"resamples": statistics.RESAMPLES, "seed": statistics.SEED},
    }


def _environment(model: PreTrainedModel) -> dict[str, Any]:
    cuda = model.device.type == "cuda"
    return {
        "scissorhands": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(model.device) if cuda else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _write(results: Results, out: Path | None) -> None:
    if out:
        results.write(out)


def _progress(console: Console) -> Progress:
    columns: Sequence[Any] = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    return Progress(*columns, console=console)
