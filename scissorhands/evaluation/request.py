"""What an evaluation is asked to do, before a model is loaded."""

from dataclasses import dataclass
from pathlib import Path

from scissorhands.budget import BudgetRequest
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.texts import Text
from scissorhands.formats import EXACT, resident
from scissorhands.grant import PLANNED
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
        budget: Share of the sequence's length; with ``compression``, one over it.
        compression: How many times smaller than a full cache in 16 bits all bytes are to be; 0 if ``budget`` decides.
    """

    policy: str
    codec: str
    budget: float
    compression: float = 0.0

    def __str__(self) -> str:
        asked = f"{self.compression:g}x" if self.compression else f"{self.budget:g}"
        return f"{self.policy} {asked}" + ("" if self.codec == EXACT else f" {self.codec}")

    @property
    def request(self) -> BudgetRequest:
        """The budget, as it is asked for."""
        if self.compression:
            return BudgetRequest.compression(self.compression)
        return BudgetRequest.fraction(self.budget)

    def key(self) -> dict[str, str | float]:
        """Return the fields that name its row."""
        asked = {"asked_compression": self.compression} if self.compression else {}
        return {"policy": self.policy, "codec": self.codec, "budget": self.budget, **asked}


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
    policies: tuple[str, ...],
    codecs: tuple[str, ...],
    budgets: tuple[float, ...],
    beside: tuple[str, ...] = (),
    compressions: tuple[float, ...] = (),
) -> tuple[Choice, ...]:
    """Return every combination once, in the order given.

    Args:
        policies: Names as they were given.
        codecs: How resident slots are stored.
        budgets: Shares of the sequence's length.
        beside: What may be named beside the policies.
        compressions: How many times smaller than a full cache in 16 bits all bytes are to be.

    Raises:
        InvalidRequestError: There is no such policy or codec, or a budget is not a share.
    """
    formats = [codec if codec == PLANNED else resident(codec).name for codec in codecs]
    labels = [policy if policy in beside else _label(policy, beside) for policy in policies]
    # One over a compression is rounded, as it names a row.
    sizes = [(budget, 0.0) for budget in budgets] + [(round(1 / asked, 6), asked) for asked in compressions]
    combinations = [
        Choice(label, codec, budget, asked) for label in labels for codec in formats for budget, asked in sizes
    ]
    for asked in compressions:
        if not asked > 1:
            raise InvalidRequestError("compression", f"must be above 1, got {asked:g}")
    for budget in budgets:
        BudgetRequest.fraction(budget)
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
