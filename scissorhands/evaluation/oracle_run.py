"""Running ``eval oracle``: how far each policy is from clairvoyance, in every layer and head."""

from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console

from scissorhands.budget import Grant
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.oracle import choice_grant, eviction_steps, foresee
from scissorhands.evaluation.recorder import interval_sums
from scissorhands.evaluation.request import ORACLE, ORACLES, Choice, Request
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.retention import lost
from scissorhands.evaluation.setup import Setup, prepare, tell_anew
from scissorhands.grant import grant_text

# Bounds the memory of what is recorded; changes no result.
_MOST_SEQUENCES = 4


def run(request: Request, console: Console) -> Results:
    """Measure what is asked for and not yet done; ``console`` shows how far it is.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
    """
    setup = prepare(request)
    grants = {choice: choice_grant(setup, choice) for choice in with_oracle(request.choices)}
    for choice, granted in grants.items():
        if not eviction_steps(granted, request.length):
            raise InvalidRequestError("budget", f"nothing is evicted at {choice.budget:g}; give a smaller share")
    tokens = torch.from_numpy(setup.sequences()).to(setup.model.device)
    results = setup.results("oracle")
    if request.out:
        tell_anew(request, results.resume(request.out), console)

    def cell(choice: Choice, granted: Grant) -> Cell:
        passes = 3 if choice.policy in ORACLES else 2
        return Cell(
            label=str(choice),
            key=choice.key(),
            grant=grant_text(granted),
            work=passes * tokens.numel(),
            measure=lambda advance: _measure(setup, choice, granted, tokens, advance),
        )

    with Runner(results, request.out, console) as runner:
        cells = [cell(choice, granted) for choice, granted in grants.items()]
        runner.measure(cells, lambda row: f"{row['lost_percent']:.2f} % lost")
    return results


def with_oracle(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices with the oracle of each budget before them, each once."""
    oracles = [Choice(ORACLE, choice.codec, choice.budget) for choice in choices]
    return list(dict.fromkeys([*oracles, *choices]))


def _measure(setup: Setup, choice: Choice, granted: Grant, tokens: torch.Tensor, advance: Advance) -> Row:
    steps = eviction_steps(granted, tokens.shape[1])
    parts = []
    for start in range(0, len(tokens), _MOST_SEQUENCES):
        batch = tokens[start : start + _MOST_SEQUENCES]
        between = interval_sums(setup.model, batch, steps, progress=advance)
        planner = None
        if choice.policy in ORACLES:
            planner = foresee(setup.model, granted, batch, by_values=choice.policy != ORACLE, progress=advance)
        parts.append(lost(setup.model, granted, batch, steps, between, planner, advance))
    shares = 100 * np.concatenate(parts)
    return {
        "slots": granted.layer_slots[0],
        "raised": granted.raised,
        "evictions": len(steps),
        "lost_percent": float(shares.mean()),
        "lost_percent_by_sequence": shares.mean(axis=(1, 2)).tolist(),
        # [layers][kv_heads], means over the sequences.
        "lost_percent_by_head": shares.mean(axis=0).tolist(),
    }
