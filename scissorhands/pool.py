"""Pools: the tensors that rows of one size class live in."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from scissorhands.budget import Grant, ModelShape
from scissorhands.signals import Observation, Signal, signals_for
from scissorhands.snapshot import LayerEvidence


@dataclass(frozen=True)
class Span:
    """Adjacent rows of a pool that take the same number of new tokens in one forward pass.

    Args:
        rows: The rows.
        lengths: Slots in use of each row before the new tokens.
        steps: Tokens that each row has seen before them.
        incoming: a, new tokens of each row.
        device: Where the index tensors live.
    """

    rows: slice
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    incoming: int
    device: torch.device

    @property
    def extent(self) -> int:
        """Slots that the longest row uses once the new tokens are in."""
        return max(self.lengths) + self.incoming

    @cached_property
    def even(self) -> bool:
        """Whether all rows use equally many slots."""
        return min(self.lengths) == max(self.lengths)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """``[R, 1]`` indices of the rows."""
        return torch.arange(self.rows.start, self.rows.stop, device=self.device).unsqueeze(1)

    @cached_property
    def slot_index(self) -> torch.Tensor:
        """``[R, a]`` slots that the new tokens go to."""
        first = torch.tensor(self.lengths, device=self.device).unsqueeze(1)
        return first + torch.arange(self.incoming, device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[R, a]`` int32 true positions of the new tokens."""
        first = torch.tensor(self.steps, dtype=torch.int32, device=self.device).unsqueeze(1)
        return first + torch.arange(self.incoming, dtype=torch.int32, device=self.device)

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """``[R, 1, a, extent]`` bool, which slots each new query sees; None when each sees all."""
        if self.incoming == 1 and self.even:
            return None
        slots = torch.arange(self.extent, device=self.device)
        return (slots <= self.slot_index.unsqueeze(-1)).unsqueeze(1)


class LayerPool:
    """One layer's slots for all rows of a pool.

    Args:
        rows: R, number of rows.
        kv_heads: H, key-value heads.
        slots: B, slots of each row.
        head_dim: D, elements of a key.
        signals: The evidence to gather.
        dtype: Number type of keys and values.
        device: Where the tensors live.
    """

    def __init__(
        self,
        rows: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        signals: tuple[Signal, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.signals = signals
        self.keys = torch.zeros(rows, kv_heads, slots, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.zeros(rows, kv_heads, slots, dtype=torch.int32, device=device)
        self.states = [signal.allocate(rows, kv_heads, slots, device) for signal in signals]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that holds a share of each slot."""
        yield self.keys
        yield self.values
        yield self.positions
        yield from self.states

    def append(self, span: Span, keys: torch.Tensor, values: torch.Tensor, *, fresh: bool = True) -> None:
        """Put new keys and values ``[R, H, a, D]`` behind the slots in use.

        Args:
            span: The rows and where their new tokens go.
            keys: The keys.
            values: The values.
            fresh: Whether the tokens' evidence starts at zero; not when a pass is repeated that already counted.
        """
        if span.even:
            place = (span.rows, slice(None), slice(span.lengths[0], span.extent))
            self.keys[place] = keys
            self.values[place] = values
            self.positions[place] = span.positions.unsqueeze(1)
            for state in self.states if fresh else ():
                state[place] = 0
            return
        at = (span.row_index, slice(None), span.slot_index)
        self.keys[at] = keys.transpose(1, 2)
        self.values[at] = values.transpose(1, 2)
        self.positions[at] = span.positions.unsqueeze(-1)
        for state in self.states if fresh else ():
            state[at] = 0

    def observe(self, span: Span, probabilities: torch.Tensor) -> None:
        """Add the attention of the new queries, ``[R, H, a, extent]``, to the evidence."""
        lengths = tuple(length + 1 for length in span.lengths)
        seen = Observation(probabilities, span.visible, lengths, span.steps)
        for signal, state in zip(self.signals, self.states, strict=True):
            signal.observe(state[span.rows], seen)

    def evidence(self, row: int, length: int) -> LayerEvidence:
        """Copy the evidence of a row's ``length`` slots to the host."""
        signals = {
            signal.name: signal.value(state[row, :, :length]).cpu().numpy()
            for signal, state in zip(self.signals, self.states, strict=True)
        }
        # Copies: later steps change the tensors that the arrays would share memory with.
        signals = {name: np.array(value) for name, value in signals.items()}
        return LayerEvidence(positions=np.array(self.positions[row, :, :length].cpu().numpy()), signals=signals)

    def take(self, row: int, slots: torch.Tensor) -> "Slots":
        """Copy the given slots ``[H, d]`` of a row."""
        heads = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        return Slots(
            keys=self.keys[row][heads, slots],
            values=self.values[row][heads, slots],
            positions=self.positions[row][heads, slots],
            mass=self.states[0][row][heads, slots],
        )

    def compact(self, row: int, slots: torch.Tensor) -> None:
        """Move the given slots ``[H, k]``, ascending, to the front of a row; the rest of the row is free."""
        heads = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        kept = slots.shape[1]
        for tensor in self.tensors():
            tensor[row, :, :kept] = tensor[row][heads, slots]

    @torch.inference_mode(False)  # Tensors made in inference mode could not be changed outside of it.
    def add_row(self) -> None:
        """Grow by one empty row, exactly."""
        self.keys, self.values, self.positions, *self.states = [
            torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]) for tensor in self.tensors()
        ]

    def move_last_row(self, into: int) -> None:
        """Copy the last row to the place of row ``into``."""
        for tensor in self.tensors():
            if into != len(tensor) - 1:
                tensor[into] = tensor[-1]

    def hide_last_row(self) -> None:
        """Shrink by one row, without giving its memory back and without a need for memory."""
        self.keys, self.values, self.positions, *self.states = [tensor[:-1] for tensor in self.tensors()]

    @torch.inference_mode(False)
    def release_hidden(self) -> None:
        """Give the memory of hidden rows back: what is allocated is exactly the rows."""
        self.keys, self.values, self.positions, *self.states = [tensor.clone() for tensor in self.tensors()]


@dataclass(frozen=True)
class Slots:
    """Slots of one layer, taken out of a row.

    Args:
        keys: ``[kv_heads, d, head_dim]``, after position embedding.
        values: ``[kv_heads, d, head_dim]``.
        positions: ``[kv_heads, d]`` int32, ascending within a head.
        mass: ``[kv_heads, d]`` float32, attention received, in queries.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    mass: torch.Tensor


class Pool:
    """All layers' slots of the rows of one size class: equal budgets and equal evidence.

    A pool holds exactly the rows that are in use, so that what is allocated is what was granted.

    Args:
        grant: The grant that the rows share in budgets and signals.
        shape: The model's sizes.
        dtype: Number type of keys and values.
        device: Where the tensors live.
    """

    def __init__(self, grant: Grant, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        signals = signals_for(grant)
        self.rows = 0
        self.layers = [
            LayerPool(0, shape.kv_heads, slots, shape.head_dim, signals, dtype, device) for slots in grant.layer_slots
        ]

    def add_row(self) -> int:
        """Add an empty row and return its index. If memory runs out halfway, all layers stay as they were."""
        with ExitStack() as undo:
            for layer in self.layers:
                layer.add_row()
                undo.callback(layer.hide_last_row)
            undo.pop_all()
        self.rows += 1
        return self.rows - 1

    def remove_row(self, row: int) -> None:
        """Remove a row; the last row takes its index. If memory runs out, the row is removed all the same."""
        for layer in self.layers:
            layer.move_last_row(into=row)
        for layer in self.layers:
            layer.hide_last_row()
        self.rows -= 1
        # Torch's out-of-memory errors. What is not given back now is given back with the next row that goes.
        with suppress(RuntimeError):
            for layer in self.layers:
                layer.release_hidden()

    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors, measured on their storages."""
        return sum(tensor.untyped_storage().nbytes() for layer in self.layers for tensor in layer.tensors())
