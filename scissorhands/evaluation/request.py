"""What an evaluation is asked to do, before a model is loaded."""

from dataclasses import dataclass
from pathlib import Path

from scissorhands.budget import BudgetRequest
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.texts import Text
from scissorhands.policies import get_policy, policy_names

# The other codecs store what was evicted; none of them is resident yet.
CODECS = ("none",)


@dataclass(frozen=True)
class Choice:
    """One way to hold a cache.

    Args:
        policy: ``name`` or ``name:preset``.
        codec: How resident slots are stored.
        budget: Share of the sequence's length.
    """

    policy: str
    codec: str
    budget: float

    def __str__(self) -> str:
        return f"{self.policy} {self.budget:g}" + ("" if self.codec == "none" else f" {self.codec}")


@dataclass(frozen=True)
class Request:
    """What to measure, in what all commands share.

    Args:
        model: A folder or a hub id.
        texts: Where the sequences come from.
        choices: What to compare to the full cache.
        sequences: Sequences over all texts.
        length: Tokens of each.
        quick: Whether a first look is enough.
        dtype: As in :func:`scissorhands.evaluation.loading.load`.
        device: As in :func:`scissorhands.evaluation.loading.load`.
        out: Where the results are written and resumed from; None: nowhere.
    """

    model: str
    texts: tuple[Text, ...]
    choices: tuple[Choice, ...]
    sequences: int
    length: int
    quick: bool
    dtype: str
    device: str
    out: Path | None


def choices(policies: tuple[str, ...], codecs: tuple[str, ...], budgets: tuple[float, ...]) -> tuple[Choice, ...]:
    """Return every combination once, in the order given.

    Raises:
        InvalidRequestError: There is no such policy or codec, or a budget is not a share.
    """
    for codec in codecs:
        if codec not in CODECS:
            raise InvalidRequestError("codec", f"{codec!r} cannot be resident; allowed: {', '.join(CODECS)}")
    for budget in budgets:
        BudgetRequest.fraction(budget)
    labels = [_label(policy) for policy in policies]
    combinations = [Choice(label, codec, budget) for label in labels for codec in codecs for budget in budgets]
    return tuple(dict.fromkeys(combinations))


def _label(policy: str) -> str:
    """Return a policy's name as it is listed; raises for one that there is not."""
    name, _, preset = policy.partition(":")
    try:
        found = get_policy(name, preset)
    except InvalidRequestError as error:
        allowed = ", ".join(policy_names())
        raise InvalidRequestError("policy", f"there is no {policy!r}; allowed: {allowed}") from error
    return found.name if found.preset == "default" else f"{found.name}:{found.preset}"
