"""Where the tensors of rows lie, as the kernels read it: one ``[fields, rows]`` int64 tensor a layer."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from scissorhands.layer_pool import LayerPool
from scissorhands.signals import LastAttention, LowCount, Mass, Redundancy, Signal, Weight, WindowMass

# Fields that are addresses, in order: keys, values, positions, then the states of these signals; capacity and piece
# follow. The kernels name the same (scissorhands.kernels.decode).
_STATES = (Mass, LowCount, WindowMass, LastAttention, Weight)
FIELDS = 3 + len(_STATES) + 2
CAPACITY = FIELDS - 2
# Signals that the kernels keep; redundancy is worked out when a snapshot is taken, and has no state.
SIGNALS: frozenset[type[Signal]] = frozenset({*_STATES, Redundancy})
# A row is cut into at most so many pieces, and no piece is smaller than this.
_PIECES = 64
_SMALLEST = 256
# Fields of a place without a row. Nothing is read there, but its pieces are counted.
NOWHERE = (*[0] * CAPACITY, 1, _SMALLEST)


def piece_of(capacity: int) -> int:
    """Return how many slots one program goes over in a row of ``capacity`` slots, a power of two."""
    return max(_SMALLEST, 1 << (-(-capacity // _PIECES) - 1).bit_length())


def most_pieces(capacity: int) -> int:
    """Return how many pieces a row of at most ``capacity`` slots is cut into at most."""
    return min(_PIECES, -(-capacity // _SMALLEST))


def entry(pool: LayerPool, row: int) -> tuple[int, ...]:
    """Return a row's fields in one layer; the address of what there is not is 0."""
    capacity = pool.positions.shape[2]
    states = {type(signal): state for signal, state in zip(pool.signals, pool.states, strict=True)}
    tensors = (pool.keys, pool.values, pool.positions, *(states.get(kind) for kind in _STATES))
    addresses = (
        0 if tensor is None else tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
        for tensor in tensors
    )
    return (*addresses, capacity, piece_of(capacity))


def table_of(pool: LayerPool, rows: slice, device: torch.device) -> torch.Tensor:
    """Return the table of adjacent rows of a pool; it is kept until they lie elsewhere."""
    return _table(tuple(entry(pool, row) for row in range(rows.start, rows.stop)), device)


@lru_cache(maxsize=1024)
def _table(entries: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int64).T.contiguous().to(device)
