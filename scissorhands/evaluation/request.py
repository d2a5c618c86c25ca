"""What an evaluation is asked to do, before a model is loaded."""

from dataclasses import dataclass
from pathlib import Path

from scissorhands.budget import BudgetRequest
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.texts import Text
from scissorhands.formats import EXACT, resident
from scissorhands.policies import get_policy, policy_names
from scissorhands.policies.full import Full

# The oracle knows the text to come, so it is no policy that a server could be asked for: only measurements that feed
# a given text twice take it. With :values, attention counts by the norm of what is attended to.
ORACLE = "oracle"
ORACLES = (ORACLE, "oracle:values")


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
        return f"{self.policy} {self.budget:g}" + ("" if self.codec == EXACT else f" {self.codec}")


FULL = Choice(Full.name, EXACT, 1.0)


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
        profile: What eviction costs in the model's heads; None: the file in its folder, if there is one.
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
    profile: Path | None = None


def choices(
    policies: tuple[str, ...], codecs: tuple[str, ...], budgets: tuple[float, ...], beside: tuple[str, ...] = ()
) -> tuple[Choice, ...]:
    """Return every combination once, in the order given.

    Args:
        policies: Names as they were given.
        codecs: How resident slots are stored.
        budgets: Shares of the sequence's length.
        beside: What may be named beside the policies.

    Raises:
        InvalidRequestError: There is no such policy or codec, or a budget is not a share.
    """
    formats = [resident(codec).name for codec in codecs]
    for budget in budgets:
        BudgetRequest.fraction(budget)
    labels = [policy if policy in beside else _label(policy, beside) for policy in policies]
    combinations = [Choice(label, codec, budget) for label in labels for codec in formats for budget in budgets]
    return tuple(dict.fromkeys(combinations))


def _label(policy: str, beside: tuple[str, ...]) -> str:
    """Return a policy's name as it is listed; raises for one that there is not."""
    name, _, preset = policy.partition(":")
    try:
        found = get_policy(name, preset)
    except InvalidRequestError as error:
        allowed = ", ".join([*policy_names(), *beside])
        raise InvalidRequestError("policy", f"there is no {policy!r}; allowed: {allowed}") from error
    return found.name if found.preset == "default" else f"{found.name}:{found.preset}"
