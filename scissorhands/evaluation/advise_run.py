"""Running ``scissorhands advise``: the full cache, then by bisection the smallest budget that will do."""

from rich.console import Console

from scissorhands.budget import Grant
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation import statistics
from scissorhands.evaluation.advice import Advice, loss_percent, smallest_within
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.losses import full_fields, full_losses, loss_fields
from scissorhands.evaluation.perplexity import measure
from scissorhands.evaluation.request import Choice, Request
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.setup import Setup, prepare, tell_anew
from scissorhands.evaluation.texts import Tokens
from scissorhands.grant import grant_text

# The choices of one policy and codec, the smallest budget first, with their grants.
_Candidates = dict[Choice, Grant]


def run(request: Request, wanted: float, console: Console) -> list[Advice]:
    """Measure what is needed and not yet done; ``console`` shows how far it is.

    Args:
        request: What to measure; its choices are the candidates.
        wanted: The loss that is allowed, in percent of the perplexity after the first eviction.
        console: Where progress is shown.

    Returns:
        The advice for each policy, in the order asked for.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
        EngineError: The model's losses are not finite.
    """
    setup = prepare(request)
    candidates = _candidates(setup, request)
    tokens = setup.sequences()
    results = setup.results("advise", bootstrap={"resamples": statistics.RESAMPLES, "seed": statistics.SEED})
    if request.out:
        tell_anew(request, results.resume(request.out, full_losses), console)
    with Runner(results, request.out, console) as runner:
        runner.measure_full("full cache", _work(tokens), lambda advance: _full(setup, tokens, advance))
        return [_advise(setup, results, runner, tokens, choices, wanted) for choices in candidates]


def _candidates(setup: Setup, request: Request) -> list[_Candidates]:
    """Return what may be advised, of each policy; budgets that a policy cannot work with are left out.

    Raises:
        InvalidRequestError: Of a policy, none is left.
    """
    found: dict[tuple[str, str], _Candidates] = {}
    for choice in sorted(request.choices, key=lambda choice: choice.budget):
        granted = setup.grant(choice)
        allowed = found.setdefault((choice.policy, choice.codec), {})
        if not granted.raised:
            allowed[choice] = granted
    for (policy, _), allowed in found.items():
        if not allowed:
            raise InvalidRequestError(
                "length", f"{request.length} tokens are too few for policy {policy} at any of the budgets"
            )
    order = list(dict.fromkeys((choice.policy, choice.codec) for choice in request.choices))
    return [found[name] for name in order]


def _advise(
    setup: Setup, results: Results, runner: Runner, tokens: Tokens, candidates: _Candidates, wanted: float
) -> Advice:
    by_budget = {choice.budget: choice for choice in candidates}

    def row_of(budget: float) -> Row:
        choice = by_budget[budget]
        runner.measure([_cell(setup, results, tokens, choice, candidates[choice])], _describe)
        row = results.row_of(choice.key())
        assert row is not None
        return row

    measured: dict[float, Row] = {}

    def within(budget: float) -> bool:
        measured[budget] = row_of(budget)
        return loss_percent(measured[budget]) <= wanted

    best = smallest_within(list(by_budget), within)
    return Advice(
        policy=next(iter(candidates)).policy,
        wanted=wanted,
        sequences=len(tokens),
        full_bytes=setup.shape.full_bytes(tokens.shape[1]),
        rows=tuple(row for _, row in sorted(measured.items())),
        best=None if best is None else measured[best],
    )


def _cell(setup: Setup, results: Results, tokens: Tokens, choice: Choice, granted: Grant) -> Cell:
    def measured(advance: Advance) -> Row:
        found = measure(setup.model, granted, tokens, advance)
        return {
            **found.sizes.fields(setup.shape, tokens.shape[1], setup.model.dtype),
            **loss_fields(found.losses, found.first_eviction, full_losses(results)),
        }

    return Cell(str(choice), choice.key(), grant_text(granted), _work(tokens), measured)


def _full(setup: Setup, tokens: Tokens, advance: Advance) -> Row:
    return full_fields(measure(setup.model, setup.full_grant(), tokens, advance).losses)


def _work(tokens: Tokens) -> int:
    return tokens[:, 1:].size


def _describe(row: Row) -> str:
    return f"{loss_percent(row):+.2f} % after the first eviction"
