"""Budgets: from what a caller asks for to the slots of every layer.

The rules (``n`` slots in use, ``a`` tokens to append; letters as in :class:`EvictionParameters`):

- A row holds at most ``B`` slots per layer and KV head. Before ``a`` tokens are appended with ``n + a > B``,
  ``max(m, n + a - B)`` slots are dropped, none of them exempt.
- A budget is valid if ``m >= L`` and ``B >= s + t + max(r, L) + max(m, c)``.
- A sliding layer holds its window, whatever the budget is: the budget governs the global layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property

from scissorhands.errors import BudgetTooSmallError, InvalidRequestError
from scissorhands.formats import EXACT

# Bytes of a number of 16 bits, against which compression is told.
HALF_BYTES = 2


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide how large its cache is.

    Args:
        layers: Attention layers.
        kv_heads: Key-value heads per layer.
        head_dim: Elements of one key or value.
        element_bytes: Bytes of one element.
        group: Query heads that share a KV head.
        layer_windows: W of each layer, the tokens that a query of it sees; 0 for a global layer, whose queries see all.
            Nothing means that all layers are global.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    group: int = 1
    layer_windows: tuple[int, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one key and one value, without evidence."""
        return 2 * self.head_dim * self.element_bytes

    @cached_property
    def global_layers(self) -> tuple[int, ...]:
        """The layers that a budget governs."""
        return tuple(layer for layer in range(self.layers) if not self.window(layer))

    def split(self) -> "ModelShape":
        """Return the shape of the same cache with every KV head as a layer of its own."""
        windows = tuple(window for window in self.layer_windows for _ in range(self.kv_heads))
        return replace(self, layers=self.layers * self.kv_heads, kv_heads=1, layer_windows=windows)

    def window(self, layer: int) -> int:
        """Return W of a layer; 0 if it is global."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def full_bytes(self, tokens: int, element_bytes: int | None = None) -> int:
        """Bytes of transformers' own cache of ``tokens``, without evidence.

        It holds all tokens of a global layer, and of a sliding one those that the next query will see: ``W - 1``.

        Args:
            tokens: Tokens of the sequence.
            element_bytes: Bytes of one element; default: the model's own.
        """
        windows = [window for window in self.layer_windows if window]
        slots = len(self.global_layers) * tokens + sum(min(tokens, window - 1) for window in windows)
        return self.kv_heads * slots * 2 * self.head_dim * (element_bytes or self.element_bytes)


class BudgetUnit(Enum):
    """The unit in which a budget is asked for."""

    TOKENS = "tokens"
    BYTES = "bytes"
    FRACTION = "fraction"
    COMPRESSION = "compression"


@dataclass(frozen=True)
class BudgetRequest:
    """What a caller asks for.

    Args:
        unit: The unit of ``amount``.
        amount: Slots per layer and head, bytes of the whole sequence, a share of its length in (0, 1], or how many
            times smaller than a full cache of the sequence in 16 bits all its bytes are to be; above 1.

    Raises:
        InvalidRequestError: The amount is not a finite number in its range.
    """

    unit: BudgetUnit
    amount: float

    def __post_init__(self) -> None:
        field = f"budget.{self.unit.value}"
        if not math.isfinite(self.amount):
            raise InvalidRequestError(field, f"must be a finite number, got {self.amount}")
        if self.unit is BudgetUnit.FRACTION:
            if not 0 < self.amount <= 1:
                raise InvalidRequestError(field, f"must be above 0 and at most 1, got {self.amount:g}")
        elif self.unit is BudgetUnit.COMPRESSION:
            if self.amount <= 1:
                raise InvalidRequestError(field, f"must be above 1, got {self.amount:g}")
        elif self.amount < 1 or self.amount != int(self.amount):
            raise InvalidRequestError(field, f"must be a whole number of at least 1, got {self.amount:g}")

    @classmethod
    def tokens(cls, amount: int) -> "BudgetRequest":
        """Ask for ``amount`` slots per layer and KV head."""
        return cls(BudgetUnit.TOKENS, amount)

    @classmethod
    def bytes(cls, amount: int) -> "BudgetRequest":
        """Ask for ``amount`` bytes, evidence included, over all layers."""
        return cls(BudgetUnit.BYTES, amount)

    @classmethod
    def fraction(cls, amount: float) -> "BudgetRequest":
        """Ask for ``amount`` of prompt plus new tokens, raised to the smallest valid budget."""
        return cls(BudgetUnit.FRACTION, amount)

    @classmethod
    def compression(cls, amount: float) -> "BudgetRequest":
        """Ask for a row ``amount`` times smaller than a full cache in 16 bits, all its bytes counted."""
        return cls(BudgetUnit.COMPRESSION, amount)

    def in_bytes(self, shape: ModelShape, total_tokens: int | None) -> "BudgetRequest":
        """Return a request for the bytes that a compression comes to; any other as it is.

        Raises:
            InvalidRequestError: There is no length, or not one byte is left.
        """
        if self.unit is not BudgetUnit.COMPRESSION:
            return self
        if total_tokens is None:
            raise InvalidRequestError(
                "budget.compression", "needs the length of prompt and answer; ask in tokens or bytes instead"
            )
        return BudgetRequest.bytes(max(1, int(shape.full_bytes(total_tokens, HALF_BYTES) / self.amount)))


@dataclass(frozen=True)
class EvictionParameters:
    """The numbers that decide when and among what a policy evicts. All in slots, but ``window`` in queries.

    Args:
        recent: r, newest slots that are exempt.
        sinks: s, first tokens of the sequence that are exempt.
        drop: m, slots dropped at once; at least 1.
        lookahead: L, slots between snapshot and eviction; 0 plans on the spot.
        chunk: c, tokens of one prefill chunk; at least 1.
        window: w, queries that importance looks back on; 0 means all.
        tail: t, last tokens of the prompt that are exempt.
    """

    recent: int
    sinks: int
    drop: int
    lookahead: int
    chunk: int
    window: int
    tail: int = 0

    @property
    def smallest_budget(self) -> int:
        """The smallest B that these numbers allow."""
        return self.exempt + max(self.drop, self.chunk)

    @property
    def exempt(self) -> int:
        """The most slots that are exempt from an eviction."""
        return self.sinks + self.tail + max(self.recent, self.lookahead)

    @property
    def smallest_layer(self) -> int:
        """The smallest B of a layer beside others that have more: its recent slots make room for the rest."""
        return self.sinks + self.tail + self.lookahead + max(self.drop, self.chunk)

    def within(self, slots: int) -> "EvictionParameters":
        """Return the numbers of a layer of ``slots``; its recent slots are fewer where there is no room for r."""
        room = max(0, slots - self.sinks - self.tail - max(self.drop, self.chunk))
        return self if self.recent <= room else replace(self, recent=room)


@dataclass(frozen=True)
class Grant:
    """A resolved budget: every number that decides what is kept. It never changes while its sequence lives.

    Args:
        policy: Name of the policy.
        preset: Preset of the policy.
        layer_slots: B of each global layer; of a sliding one its window, or the sequence's length if that is smaller.
            With budgets by head, of each KV head instead, layer by layer.
        parameters: The policy's numbers.
        bytes: Bytes that the row allocates, evidence included.
        raised: True when a fraction was raised to the smallest valid budget.
        by_head: Whether the KV heads of a layer have budgets of their own. Such a row is stored, and planned for, as if
            every KV head were a layer.
        codecs: Formats in which the slots of each entry of ``layer_slots`` are resident (:mod:`scissorhands.formats`);
            nothing means that all are as they are, as those of a sliding layer always are.
    """

    policy: str
    preset: str
    layer_slots: tuple[int, ...]
    parameters: EvictionParameters
    bytes: int
    raised: bool = False
    by_head: bool = False
    codecs: tuple[str, ...] = ()

    def codec_of(self, layer: int) -> str:
        """Return the format in which the slots of an entry of ``layer_slots`` are resident."""
        return self.codecs[layer] if self.codecs else EXACT

    def shape_of(self, shape: ModelShape) -> ModelShape:
        """Return the shape in which a row of this grant is stored, for a model of ``shape``."""
        return shape.split() if self.by_head else shape


# The numbers of a policy for a base budget of B slots.
ParametersFor = Callable[[int], EvictionParameters]


def apply_overrides(base: ParametersFor, overrides: dict[str, int]) -> ParametersFor:
    """Return ``base`` with some of its numbers replaced.

    Raises:
        InvalidRequestError: An override has an unknown name or is out of range.
    """
    known = [field.name for field in fields(EvictionParameters)]
    for name, value in overrides.items():
        if name not in known:
            raise InvalidRequestError(f"policy.parameters.{name}", f"unknown; allowed: {', '.join(known)}")
        if value < (1 if name in ("drop", "chunk") else 0):
            raise InvalidRequestError(f"policy.parameters.{name}", f"must be at least 1, got {value}")

    def parameters(slots: int) -> EvictionParameters:
        own = base(slots)
        return EvictionParameters(**{name: overrides.get(name, getattr(own, name)) for name in known})

    return parameters


def smallest_budget(parameters_for: ParametersFor) -> int:
    """Return the smallest B that is valid with the numbers that belong to it."""
    slots = 1
    while parameters_for(slots).smallest_budget > slots:
        slots = max(slots + 1, min(parameters_for(slots).smallest_budget, slots * 2))
    while slots > 1 and parameters_for(slots - 1).smallest_budget <= slots - 1:
        slots -= 1
    return slots


def resolve_slots(
    request: BudgetRequest,
    parameters_for: ParametersFor,
    bytes_per_token: int,
    total_tokens: int | None,
    fixed_bytes: int = 0,
) -> tuple[int, bool]:
    """Turn a request into B.

    Args:
        request: What was asked for.
        parameters_for: The policy's numbers for a B.
        bytes_per_token: Bytes of one slot in all global layers and heads, evidence included.
        total_tokens: Prompt plus new tokens; B never exceeds it. None if unknown, then a fraction is refused.
        fixed_bytes: Bytes that the sequence takes whatever its budget: those of its sliding layers.

    Returns:
        B and whether a fraction was raised to the smallest valid budget.

    Raises:
        BudgetTooSmallError: B is below the smallest valid budget.
        InvalidRequestError: The policy's numbers contradict each other, or a fraction has nothing to be a share of.
    """
    field = f"budget.{request.unit.value}"
    raised = False
    smallest = smallest_budget(parameters_for)
    if request.unit is BudgetUnit.FRACTION:
        if total_tokens is None:
            raise InvalidRequestError(field, "needs the length of prompt and answer; ask in tokens or bytes instead")
        slots = round(request.amount * total_tokens)
        if slots < smallest:
            slots, raised = smallest, True
    elif request.unit is BudgetUnit.BYTES:
        slots = (int(request.amount) - fixed_bytes) // max(1, bytes_per_token)
    else:
        slots = int(request.amount)
    if total_tokens is not None and slots >= total_tokens:
        return total_tokens, raised  # Nothing will ever be evicted, so any numbers do.
    parameters = parameters_for(slots)
    if parameters.drop < parameters.lookahead:
        raise InvalidRequestError(
            "policy.parameters.drop", f"must be at least lookahead ({parameters.lookahead}), got {parameters.drop}"
        )
    if slots < parameters.smallest_budget:
        wanted = fixed_bytes + smallest * bytes_per_token if request.unit is BudgetUnit.BYTES else smallest
        raise BudgetTooSmallError(
            field,
            f"too small for this policy: the smallest is {wanted} {request.unit.value} ({smallest} slots), "
            f"got {request.amount:g}",
            smallest,
        )
    return slots, raised


def slots_to_drop(
    lengths: Sequence[int], budgets: Sequence[int], parameters: EvictionParameters, incoming: int, ahead: int = 0
) -> list[int]:
    """Return how many slots each layer must drop before ``incoming`` tokens are appended.

    A layer that would overflow drops ``max(m, n + a - B)``, but while a prompt is read only as many beyond the
    ``n + a - B`` that it must as are not exempt. A layer that would overflow before ``m`` more tokens drops ``m`` along
    with it, so that a row's evictions are at least ``m`` steps apart whatever its layers' budgets. A layer of which
    nothing is known is a sliding one and drops nothing: its window moves by itself.

    Args:
        lengths: n of each layer, as far as evidence is at hand.
        budgets: B of each layer.
        parameters: The policy's numbers.
        incoming: a.
        ahead: Slots that each layer will have filled beyond those by then.

    Returns:
        Slots to drop of each layer; all 0 when nothing overflows.
    """
    used = [n + ahead if n else 0 for n in lengths]
    overflow = [n + incoming - b for n, b in zip(used, budgets, strict=True)]
    if all(over <= 0 for n, over in zip(used, overflow, strict=True) if n):
        return [0] * len(overflow)
    drop = parameters.drop
    exempt = {b: parameters.within(b).exempt for b in set(budgets)}
    return [
        max(over, min(drop, n - exempt[b]), 0) if n and over > 1 - drop else 0
        for n, over, b in zip(used, overflow, budgets, strict=True)
    ]
