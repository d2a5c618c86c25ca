"""Running ``eval agreement``: the full cache's answers first, then cell by cell."""

from functools import partial

import numpy as np
from rich.console import Console

from scissorhands.evaluation import statistics
from scissorhands.evaluation.agreement import Agreement, agree, work
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.decoding import answers
from scissorhands.evaluation.request import Choice, Request
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.setup import prepare, tell_anew
from scissorhands.evaluation.sizes import governed_slots
from scissorhands.evaluation.texts import Tokens, sequences_of
from scissorhands.grant import grant_text


def run(request: Request, new_tokens: int, console: Console) -> Results:
    """Measure what is asked for and not yet done; ``console`` shows how far it is.

    Args:
        request: What to measure; its length is that of prompt and answer.
        new_tokens: Tokens of each answer.
        console: Where progress is shown.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
        EngineError: The model's distributions are not finite.
    """
    setup = prepare(request)
    grants = {choice: setup.grant(choice) for choice in request.choices}
    length = request.length - new_tokens
    prompts = sequences_of(list(request.texts), setup.tokenizer, request.sequences, length)
    results = setup.results(
        "agreement", new_tokens=new_tokens, bootstrap={"resamples": statistics.RESAMPLES, "seed": statistics.SEED}
    )
    if request.out:
        tell_anew(request, results.resume(request.out, full_answers), console)

    def measure_full(advance: Advance) -> Row:
        found = answers(setup.model, setup.full_grant(), prompts.tolist(), new_tokens, advance)
        return {"tokens": found.tolist()}

    def measure(choice: Choice, advance: Advance) -> Row:
        granted = grants[choice]
        found = agree(setup.model, granted, setup.full_grant(), prompts, full_answers(results), advance)
        return {
            "slots": governed_slots(granted, setup.shape),
            "raised": granted.raised,
            **found.sizes.fields(setup.shape, request.length, setup.model.dtype),
            **_figures(found),
        }

    cells = [
        Cell(
            label=str(choice),
            key=choice.key(),
            grant=grant_text(grants[choice]),
            work=work(prompts, new_tokens),
            measure=partial(measure, choice),
        )
        for choice in request.choices
    ]
    with Runner(results, request.out, console) as runner:
        runner.measure_full("full cache", work(prompts, new_tokens) // 3, measure_full)
        runner.measure(cells, lambda row: f"{row['kl_nats']:.4f} nats, {row['share_equal']:.0%} equal")
    return results


def full_answers(results: Results) -> Tokens:
    """Return the answers of the full cache, ``[sequences, new_tokens]``.

    Raises:
        ValueError: They are not of this shape.
        KeyError: There are none.
    """
    shape = (results.settings["sequences"], results.settings["new_tokens"])
    return np.array(results.full["tokens"], dtype=np.int64).reshape(shape)


def _figures(found: Agreement) -> Row:
    first = found.first_divergence
    new_tokens = found.same.shape[1]
    nats, same, equal = (each.mean(axis=1, dtype=np.float64) for each in (found.nats, found.same, found.equal))
    return {
        "kl_nats": float(nats.mean()),
        "kl_nats_ci95": statistics.interval_of_means(nats),
        "share_same_choice": float(same.mean()),
        "share_equal": float(equal.mean()),
        "share_equal_ci95": statistics.interval_of_means(equal),
        "first_divergence_median": float(np.median([new_tokens if each is None else each for each in first])),
        "never_diverged": sum(each is None for each in first),
        # Of each sequence, for comparisons in pairs.
        "first_divergence": first,
        "kl_nats_by_sequence": nats.tolist(),
        "share_equal_by_sequence": equal.tolist(),
    }
