"""Running ``eval perplexity``: the full cache first, then cell by cell."""

import torch
from rich.console import Console

from scissorhands.budget import Grant
from scissorhands.evaluation import statistics
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.losses import full_fields, full_losses, loss_fields
from scissorhands.evaluation.oracle import choice_grant, foresee
from scissorhands.evaluation.perplexity import measure
from scissorhands.evaluation.request import ORACLE, ORACLES, Choice, Request
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.setup import Setup, prepare, tell_anew
from scissorhands.evaluation.sizes import governed_slots
from scissorhands.evaluation.statistics import Losses
from scissorhands.evaluation.texts import Tokens
from scissorhands.grant import grant_text
from scissorhands.row import Planner


def run(request: Request, console: Console) -> Results:
    """Measure what is asked for and not yet done; ``console`` shows how far it is.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
        EngineError: The model's losses are not finite.
    """
    setup = prepare(request)
    grants = {choice: choice_grant(setup, choice) for choice in request.choices}
    tokens = setup.sequences()
    results = setup.results("perplexity", bootstrap={"resamples": statistics.RESAMPLES, "seed": statistics.SEED})
    if request.out:
        tell_anew(request, results.resume(request.out, full_losses), console)
    work = tokens.shape[0] * (tokens.shape[1] - 1)

    def measure_full(advance: Advance) -> Row:
        return full_fields(measure(setup.model, setup.full_grant(), tokens, advance).losses)

    def cell(choice: Choice) -> Cell:
        return Cell(
            label=str(choice),
            key=choice.key(),
            grant=grant_text(grants[choice]),
            work=2 * work if choice.policy in ORACLES else work,
            measure=lambda advance: _measure(setup, choice, grants[choice], tokens, full_losses(results), advance),
        )

    with Runner(results, request.out, console) as runner:
        runner.measure_full("full cache", work, measure_full)
        runner.measure([cell(choice) for choice in request.choices], lambda row: f"{row['increase_percent']:+.2f} %")
    return results


def _measure(setup: Setup, choice: Choice, granted: Grant, tokens: Tokens, full: Losses, advance: Advance) -> Row:
    def planner_for(batch: torch.Tensor) -> Planner | None:
        if choice.policy not in ORACLES:
            return None
        return foresee(setup.model, granted, batch, by_values=choice.policy != ORACLE, progress=advance)

    measured = measure(setup.model, granted, tokens, advance, planner_for)
    return {
        "slots": governed_slots(granted, setup.shape),
        "raised": granted.raised,
        **measured.sizes.fields(setup.shape, tokens.shape[1], setup.model.dtype),
        **loss_fields(measured.losses, measured.first_eviction, full),
    }
