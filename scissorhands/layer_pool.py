"""One layer's slots for all rows of a pool."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from scissorhands.attended import TILE, Attended, PackedAttended
from scissorhands.codec.base import EXACT_LAYOUT, Layout, RowCodec, VectorCodec
from scissorhands.merging import fold, match, rates
from scissorhands.signals import Observation, Resident, Signal, Weight, add_mass
from scissorhands.slots import Slots
from scissorhands.snapshot import LayerEvidence
from scissorhands.span import Span


class LayerCodec(NamedTuple):
    """What packs a layer's slots: its keys and its values."""

    keys: RowCodec
    values: RowCodec


class LayerPool:
    """The slots of a layer whose queries see all tokens that are kept. A policy decides which.

    Args:
        rows: R, number of rows.
        kv_heads: H, key-value heads.
        slots: B, slots of each row.
        head_dim: D, elements of a key.
        signals: The evidence to gather, mass first; none where nothing is observed.
        dtype: Number type of keys and values.
        device: Where the tensors live.
        codec: How keys and values are packed; None: as they are.
    """

    # W, the tokens that a query sees at most; 0 when it sees all that are kept.
    window = 0

    def __init__(
        self,
        rows: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        signals: tuple[Signal, ...],
        dtype: torch.dtype,
        device: torch.device,
        codec: LayerCodec | None = None,
    ) -> None:
        self.signals = signals
        self._weight = next((index for index, signal in enumerate(signals) if isinstance(signal, Weight)), None)
        # Whether evidence can be copied as it is kept.
        self.plain = bool(signals) and all(signal.is_its_state for signal in signals)
        self.codec = codec
        self.head_dim, self.dtype = head_dim, dtype
        shape = (rows, kv_heads, slots)
        if codec is None:
            self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            self.values = torch.zeros_like(self.keys)
        else:
            self.keys, self.values = (
                torch.zeros(*shape, own.row_bytes(head_dim, dtype), dtype=torch.uint8, device=device) for own in codec
            )
        self.positions = torch.zeros(rows, kv_heads, slots, dtype=torch.int32, device=device)
        self.states = [signal.allocate(rows, kv_heads, slots, device) for signal in signals]
        # To find a row's share of each tensor takes longer than what is then done with it; it goes with their memory.
        self._rows: dict[int, list[torch.Tensor]] = {}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that holds a share of each slot."""
        yield self.keys
        yield self.values
        yield self.positions
        yield from self.states

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """How keys and values are packed, as kernels read them; None where they cannot."""
        if self.codec is None:
            return EXACT_LAYOUT, EXACT_LAYOUT
        return self.codec.keys.layout(self.head_dim), self.codec.values.layout(self.head_dim)

    def append(
        self, span: Span, keys: torch.Tensor, values: torch.Tensor, *, fresh: bool = True
    ) -> Attended | PackedAttended:
        """Put new keys and values ``[R, H, a, D]`` behind the slots in use.

        Args:
            span: The rows and where their new tokens go.
            keys: The keys.
            values: The values.
            fresh: False when a pass is repeated.

        Returns:
            What the new tokens' queries attend to.
        """
        del fresh  # Free slots have no evidence, and what a repeated pass counted already stays.
        if self.codec is not None:
            keys, values = self.codec.keys.encode_rows(keys), self.codec.values.encode_rows(values)
        if span.even:
            place = (span.rows, slice(None), slice(span.lengths[0], span.extent))
            self.keys[place] = keys
            self.values[place] = values
            self.positions[place] = span.positions.unsqueeze(1)
        else:
            at = (span.row_index, slice(None), span.slot_index)
            self.keys[at] = keys.transpose(1, 2)
            self.values[at] = values.transpose(1, 2)
            self.positions[at] = span.positions.unsqueeze(-1)
        used = (span.rows, slice(None), slice(span.extent))
        if self.codec is None:
            return Attended(self.keys[used], self.values[used], span.visible)
        return PackedAttended(self.keys[used], self.values[used], span.visible, *self.codec, self.head_dim, self.dtype)

    def observe(
        self, span: Span, attention: torch.Tensor, scores: torch.Tensor, kinds: torch.Tensor | None = None
    ) -> None:
        """Add what the new queries saw to the evidence; see :class:`~scissorhands.signals.base.Observation`."""
        used = (span.rows, slice(None), slice(span.extent))
        add_mass(self.states[0][used], attention)
        # Most policies gather mass alone, which takes less time than what follows takes to begin.
        if len(self.signals) == 1:
            return
        seen = Observation(attention, span, scores, self.positions[used], kinds)
        for signal, state in zip(self.signals[1:], self.states[1:], strict=True):
            signal.observe(state[used], seen)

    def weigh(self, span: Span, scores: torch.Tensor) -> None:
        """Let slots that others were folded into count for more in ``scores`` ``[R, H, group, a, n]``, in place."""
        if self._weight is not None:
            weights = self.states[self._weight][span.rows, :, : scores.shape[-1]]
            scores += weights[:, :, None, None]

    def evidence(self, row: int, length: int, step: int) -> LayerEvidence:
        """Copy the evidence of a row's ``length`` slots to the host, once it has seen ``step`` tokens."""
        keys, values, positions, *states = (tensor[:, :length] for tensor in self.of_row(row))
        resident = Resident(keys, values, positions, step)
        signals = {
            signal.name: signal.value(state, resident).cpu().numpy()
            for signal, state in zip(self.signals, states, strict=True)
        }
        # Copies: later steps change the tensors that the arrays would share memory with.
        signals = {name: np.array(value) for name, value in signals.items()}
        return LayerEvidence(positions=np.array(resident.positions.cpu().numpy()), signals=signals)

    def no_slots(self) -> Slots:
        """Return what an eviction takes that takes nothing."""
        keys, values = (held.new_zeros(held.shape[1], 0, held.shape[3]) for held in (self.keys, self.values))
        mass = torch.zeros(len(keys), 0, device=keys.device)
        return Slots(keys, values, self.positions.new_zeros(len(keys), 0), mass, packed=self.codec is not None)

    def fold(self, row: int, length: int, evicted: Slots) -> None:
        """Fold evicted slots into the ``length`` that a row keeps, if its policy says so."""
        if self._weight is None:
            return
        keys, values, positions, mass, weights = (
            tensor[row, :, :length]
            for tensor in (self.keys, self.values, self.positions, self.states[0], self.states[self._weight])
        )
        key_codec, value_codec = self.codec or (None, None)
        tiles = torch.split(keys, max(1, TILE // (len(keys) * self.head_dim)), dim=1)
        found = match(self._exact(evicted.keys, key_codec), (self._exact(tile, key_codec) for tile in tiles))
        step = positions[:, -1:] + 1
        own = rates(mass.gather(1, found.slots), positions.gather(1, found.slots), step)
        more = rates(evicted.mass, evicted.positions, step)
        place = found.slots.unsqueeze(-1).expand(-1, -1, values.shape[-1])
        stored = values.gather(1, place)
        folded = fold(found, self._exact(stored, value_codec), own, self._exact(evicted.values, value_codec), more)
        changed = folded.values if value_codec is None else value_codec.encode_rows(folded.values)
        values.scatter_(1, place, torch.where(folded.grown.unsqueeze(-1), changed, stored))
        weights.scatter_(1, found.slots, weights.gather(1, found.slots) + folded.growth.log())

    def exact_keys(self, keys: torch.Tensor, head: int | None = None) -> torch.Tensor:
        """Return keys as the model knows them.

        Args:
            keys: ``[kv_heads, n, ...]``, as they are held; or of one head.
            head: The head that they are of; None for all.
        """
        codec = self.codec.keys if self.codec else None
        return self._exact(keys, codec if codec is None or head is None else codec.of_head(head))

    def _exact(self, data: torch.Tensor, codec: VectorCodec | None) -> torch.Tensor:
        """Return keys or values ``[H, n, D]`` as the model knows them."""
        return data if codec is None else codec.decode(data.flatten(-2), data.shape[1], self.head_dim, self.dtype)

    @torch.inference_mode(False)  # Tensors made in inference mode could not be changed outside of it.
    def add_row(self) -> None:
        """Grow by one empty row, exactly."""
        self._hold([torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]) for tensor in self.tensors()])

    def move_last_row(self, into: int) -> None:
        """Copy the last row to the place of row ``into``."""
        for tensor in self.tensors():
            if into != len(tensor) - 1:
                tensor[into] = tensor[-1]

    def hide_last_row(self) -> None:
        """Shrink by one row, without giving its memory back and without a need for memory."""
        self._hold([tensor[:-1] for tensor in self.tensors()])

    @torch.inference_mode(False)
    def release_hidden(self) -> None:
        """Give the memory of hidden rows back: what is allocated is exactly the rows."""
        self._hold([tensor.clone() for tensor in self.tensors()])

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        """Take other tensors, in the order of :meth:`tensors`."""
        self._rows.clear()
        self.keys, self.values, self.positions, *self.states = tensors

    def of_row(self, row: int) -> list[torch.Tensor]:
        """Return a row's share ``[H, B, ...]`` of each of :meth:`tensors`."""
        if row not in self._rows:
            self._rows[row] = [tensor[row] for tensor in self.tensors()]
        return self._rows[row]
