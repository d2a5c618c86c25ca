"""Budgets as callers ask for them."""

import re
from dataclasses import dataclass

from scissorhands import errors as core_errors
from scissorhands.budget import BudgetRequest, BudgetUnit
from scissorhands_client.errors import InvalidRequestError

_BYTE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# The most that the protocol's numbers hold with room to spare.
_LARGEST = 2**63 - 1
_BUDGET = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>%|[a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """The most that one sequence's cache may hold.

    Made by :meth:`tokens`, :meth:`bytes`, :meth:`fraction`, :meth:`compression` or :meth:`parse`.

    Args:
        unit: The unit of ``amount``.
        amount: Slots per layer and KV head, bytes of the whole sequence, a share of its length in (0, 1], or how many
            times smaller than a full cache of the sequence in 16 bits all its bytes are to be.

    Raises:
        InvalidRequestError: The amount is not a number in its range.
    """

    unit: BudgetUnit
    amount: float

    def __post_init__(self) -> None:
        if self.amount > _LARGEST:
            raise InvalidRequestError.local(f"budget.{self.unit.value}", f"must be at most {_LARGEST}")
        try:
            BudgetRequest(self.unit, self.amount)
        except core_errors.InvalidRequestError as error:
            raise InvalidRequestError.local(error.field, error.description) from None

    @classmethod
    def tokens(cls, amount: int) -> "Budget":
        """Ask for ``amount`` slots per layer and KV head."""
        return cls(BudgetUnit.TOKENS, amount)

    @classmethod
    def bytes(cls, amount: int) -> "Budget":
        """Ask for ``amount`` bytes, evidence included, over all layers."""
        return cls(BudgetUnit.BYTES, amount)

    @classmethod
    def fraction(cls, amount: float) -> "Budget":
        """Ask for ``amount`` of prompt plus new tokens, raised to the smallest valid budget."""
        return cls(BudgetUnit.FRACTION, amount)

    @classmethod
    def compression(cls, amount: float) -> "Budget":
        """Ask for a cache ``amount`` times smaller than a full one in 16 bits, all its bytes counted."""
        return cls(BudgetUnit.COMPRESSION, amount)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read ``20%`` or ``0.2`` (fraction), ``256`` (tokens), ``64MiB`` (bytes) or ``20x`` (compression).

        Raises:
            InvalidRequestError: The text is none of these.
        """
        match = _BUDGET.fullmatch(text.strip())
        unit = match["unit"].lower() if match else ""
        if match is None or (unit not in ("", "%", "x", "tokens") and unit not in _BYTE_UNITS):
            raise InvalidRequestError.local(
                "budget",
                f"give a share (20% or 0.2), tokens (256), bytes (64MiB) or how many times smaller (20x), got {text!r}",
            )
        number = match["number"]
        if unit == "%":
            return cls.fraction(float(number) / 100)
        if unit == "x":
            return cls.compression(float(number))
        if unit in _BYTE_UNITS:
            return cls(BudgetUnit.BYTES, float(number) * _BYTE_UNITS[unit] // 1)
        if "." in number and not unit:
            return cls.fraction(float(number))
        return cls(BudgetUnit.TOKENS, float(number))

    def __str__(self) -> str:
        if self.unit is BudgetUnit.FRACTION:
            return f"{self.amount:.4g}"
        if self.unit is BudgetUnit.COMPRESSION:
            return f"{self.amount:g}x"
        return f"{int(self.amount)} {self.unit.value}"
