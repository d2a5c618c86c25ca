"""Running ``eval persistence``: the persistence of importance, and what a budget does to attention."""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.change import EDGES, measure_change
from scissorhands.evaluation.persistence import Persistence, measure_persistence
from scissorhands.evaluation.request import Choice, Request
from scissorhands.evaluation.results import Key, Results, Row
from scissorhands.evaluation.setup import Setup, prepare, tell_anew
from scissorhands.grant import grant_text
from scissorhands.probe import probe

# What a row is of: the weights that persistence was measured with, or a change by compression.
TRAINED = "trained"
RANDOM = "random"
CHANGE = "change"


def keys(request: Request, *, random_weights: bool) -> list[Key]:
    """Return the keys of all rows that are asked for."""
    weights = [TRAINED, RANDOM] if random_weights else [TRAINED]
    return [{"of": each} for each in weights] + [{"of": CHANGE, **choice.key()} for choice in request.choices]


def run(request: Request, console: Console, *, random_weights: bool, seed: int) -> Results:
    """Measure what is asked for and not yet done; ``console`` shows how far it is.

    Args:
        request: What all commands share; its choices are what attention is compared under.
        console: Shows how far it is.
        random_weights: Whether persistence is also measured with random weights.
        seed: Of the random weights.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
    """
    setup = prepare(request)
    grants = {choice: setup.grant(choice) for choice in request.choices}
    tokens = torch.from_numpy(setup.sequences()).to(setup.model.device)
    results = setup.results("persistence", seed=seed)
    if request.out:
        tell_anew(request, results.resume(request.out), console)

    def persistence_cell(weights: str) -> Cell:
        def measure(advance: Advance) -> Row:
            model = setup.model if weights == TRAINED else random_twin(setup.model, seed)
            return _persistence_row(measure_persistence(model, tokens, advance))

        return Cell(f"persistence, {weights} weights", {"of": weights}, "", tokens.numel(), measure)

    def change_cell(choice: Choice, granted: Grant) -> Cell:
        return Cell(
            label=f"change of attention, {choice}",
            key={"of": CHANGE, **choice.key()},
            grant=grant_text(granted),
            work=tokens.numel(),
            measure=lambda advance: _change_row(setup, granted, tokens, advance),
        )

    with Runner(results, request.out, console) as runner:
        runner.measure([persistence_cell(weights) for weights in ([TRAINED, RANDOM] if random_weights else [TRAINED])])
        runner.measure([change_cell(choice, granted) for choice, granted in grants.items()])
    return results


def random_twin(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a model of the same configuration with weights as they are before training; equal for equal seeds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The classes of transformers have no types here.
        made: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.dtype)  # type: ignore[no-untyped-call]
    twin: PreTrainedModel = made.eval().requires_grad_(requires_grad=False).to(model.device)
    probe(twin)
    return twin


def _persistence_row(measured: dict[float, Persistence]) -> Row:
    """Return what was measured, ``_by_head`` as [layers][kv_heads]; means over the sequences."""
    return {
        "sets": [
            {
                "share": share,
                **_percent("ratio", found.ratio),
                **_percent("pivotal", found.pivotal),
                **_percent("beyond_chance", found.beyond_chance),
            }
            for share, found in measured.items()
        ]
    }


def _percent(name: str, shares: npt.NDArray[np.float64]) -> Row:
    """Return the means of what is known; None where nothing is."""
    known = 100 * np.ma.masked_invalid(shares)
    return {f"{name}_percent": known.mean().tolist(), f"{name}_percent_by_head": known.mean(axis=0).tolist()}


def _change_row(setup: Setup, granted: Grant, tokens: torch.Tensor, advance: Advance) -> Row:
    change = measure_change(setup.model, granted, tokens, advance)
    kept = change.pairs - change.dropped
    return {
        "slots": granted.layer_slots[0],
        "raised": granted.raised,
        "pairs": int(change.pairs.sum()),
        "dropped_percent": _ratio(change.dropped.sum(), change.pairs.sum()),
        "dropped_percent_by_head": _ratio(change.dropped, change.pairs),
        "change_percent_of_kept": _ratio(change.absolute.sum(), kept.sum()),
        "change_percent_of_kept_by_head": _ratio(change.absolute, kept),
        "histogram": {"edges": EDGES.tolist(), "counts_by_layer": change.histogram.astype(int).tolist()},
    }


def _ratio(parts: npt.NDArray[np.float64], of: npt.NDArray[np.float64]) -> float | list[list[float]]:
    """Return the parts in percent; 0 of nothing."""
    shares: float | list[list[float]] = (100 * parts / np.maximum(of, 1)).tolist()
    return shares
