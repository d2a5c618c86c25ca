"""Advice: the smallest budget whose loss is within what is wanted, from measured rows, and how sure that is."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from scissorhands.evaluation.results import Row
from scissorhands.evaluation.table import Table, percent

# More sequences than this are not worth naming: the wanted loss is too close to the measured one.
_MANY = 10_000
# A bootstrap over fewer sequences gives intervals that are too narrow.
_ENOUGH = 8


def smallest_within(budgets: Sequence[float], within: Callable[[float], bool]) -> float | None:
    """Return the smallest budget for which ``within`` is true, or None, asking as seldom as can be.

    Args:
        budgets: Shares of the length, ascending.
        within: Whether a budget will do; if one does, larger ones are taken to do, too.
    """
    index = bisect_left(budgets, True, key=within)
    return budgets[index] if index < len(budgets) else None


def loss_percent(row: Row) -> float:
    """Return a row's loss: the increase of perplexity after the first eviction, 0 when nothing was evicted."""
    loss: float | None = row["increase_percent_after_eviction"]
    return 0.0 if loss is None else loss


def sequences_needed(loss: float, upper: float, wanted: float, sequences: int) -> int:
    """Return about how many sequences make the upper end of an interval fall to ``wanted``.

    Intervals of means shrink with the root of the number of sequences.

    Args:
        loss: What was measured, below ``wanted``, in percent.
        upper: The upper end of its interval.
        wanted: The loss that is allowed.
        sequences: How many were measured.
    """
    return math.ceil(sequences * ((upper - loss) / (wanted - loss)) ** 2)


@dataclass(frozen=True)
class Advice:
    """What was found for one policy.

    Args:
        policy: ``name`` or ``name:preset``.
        wanted: The loss that is allowed, in percent.
        sequences: How many were measured.
        full_bytes: Bytes of a full cache of a sequence.
        rows: What was measured, the smallest budget first.
        best: Of these, the smallest budget within the wanted loss; None if there is none.
    """

    policy: str
    wanted: float
    sequences: int
    full_bytes: int
    rows: tuple[Row, ...]
    best: Row | None

    def table(self) -> Table:
        """Return what was measured."""
        headings = ("Policy", "Budget", "Bytes", "16-bit compression", "Loss after eviction", "95 % interval", "")
        return Table(headings, [self._line(row) for row in self.rows])

    def lines(self) -> Iterator[str]:
        """Yield the advice in words."""
        if self.best is None:
            yield f"{self.policy}: no budget that was measured stays within {self.wanted:g} %; keep every token."
            return
        row = self.best
        saved, share = self.full_bytes - row["bytes_per_sequence"], row["bytes_per_sequence"] / self.full_bytes
        yield (
            f"{self.policy}: a budget of {row['budget']:.4g} changes perplexity by {_loss(row)} after the first "
            f"eviction. It takes {decimal(row['bytes_per_sequence'])} instead of {decimal(self.full_bytes)}: "
            f"{decimal(saved)} less, {1 - share:.0%}."
        )
        yield self._certainty(row)
        if self.sequences < _ENOUGH:
            yield f"Intervals from fewer than {_ENOUGH} sequences are too narrow: take this as a first look."
        smaller = [other for other in self.rows if other["budget"] < row["budget"]]
        if smaller and (interval := smaller[-1]["ci95_after_eviction"]) and interval[0] <= self.wanted:
            yield f"A budget of {smaller[-1]['budget']:.4g} changed it by {_loss(smaller[-1])}, and may be within, too."

    def _certainty(self, row: Row) -> str:
        interval, loss = row["ci95_after_eviction"], loss_percent(row)
        if row["increase_percent_after_eviction"] is None:
            return "Nothing was evicted at this budget."
        if interval is None:
            return "One sequence tells nothing of the spread between texts."
        if interval[1] <= self.wanted:
            return f"The whole 95 % interval is within {self.wanted:g} %."
        beyond = f"The 95 % interval reaches {interval[1]:+.2f} %, so that the loss may be above {self.wanted:g} %"
        needed = sequences_needed(loss, interval[1], self.wanted, self.sequences) if loss < self.wanted else _MANY
        if needed >= _MANY:
            return f"{beyond}; the measured loss is too close to it for more sequences to settle that."
        return f"{beyond}; about {needed} sequences like these {self.sequences} would settle that."

    def _line(self, row: Row) -> tuple[str, ...]:
        interval = row["ci95_after_eviction"]
        return (
            self.policy,
            f"{row['budget']:.4g}",
            decimal(row["bytes_per_sequence"]),
            f"{row['compression']:.2f}x",
            f"{loss_percent(row):+.2f} %",
            f"{interval[0]:+.2f} to {interval[1]:+.2f} %" if interval else "",
            "within" if loss_percent(row) <= self.wanted else "above",
        )


def paste(row: Row) -> Iterator[str]:
    """Yield the commands that use a row's policy and budget."""
    policy, budget = row["policy"], row["budget"]
    yield f"scissorhands generate --policy {policy} --budget {budget:.4g} ..."
    yield f"scissorhands manager --policy {policy} --budget-fraction {budget:.4g} ..."
    yield f"scissorhands worker --default-policy {policy} --default-budget {budget:.4g} ..."


def _loss(row: Row) -> str:
    return percent(loss_percent(row), row["ci95_after_eviction"])
