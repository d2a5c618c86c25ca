"""Launches the kernels of :mod:`scissorhands.kernels.decode`."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from scissorhands.codec.base import Layout
from scissorhands.kernels import decode
from scissorhands.kernels.table import SIGNALS, most_pieces, table_of
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.signals import LastAttention, LowCount, Weight, WindowMass
from scissorhands.span import Span

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Query heads to a KV head at least, for the products of small matrices, and at most.
_LEAST_GROUP = 16
_MOST_GROUP = 64
_HEAD_DIMS = frozenset({16, 32, 64, 128, 256})
# Numbers of keys that a program holds at once.
_BLOCK = 2**13
# Triton's interpreter multiplies no bfloat16.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


class Kernel(NamedTuple):
    """What a layer's kernels are compiled for.

    Args:
        heads: KV heads.
        head_dim: Elements of a key.
        dtype: Number type of the model's keys and values.
        keys: How keys are packed.
        values: How values are.
        half: Queries of a bucket; 1 without buckets.
        low: Whether there are low counts,
        window: mass in buckets,
        last: the last query's attention,
        weighted: and weights.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    keys: Layout
    values: Layout
    half: int
    low: bool
    window: bool
    last: bool
    weighted: bool


@dataclass(frozen=True)
class Places:
    """Where the rows of a batch are in one layer, on the device.

    Args:
        table: ``[fields, R]`` int64 (:mod:`scissorhands.kernels.table`).
        slots: ``[R]`` integers, where each row's new token goes; below zero for a place without a row.
        steps: ``[R]`` integers, tokens that each row has seen, of the type of ``slots``.
        capacity: Slots that a row has at most.
    """

    table: torch.Tensor
    slots: torch.Tensor
    steps: torch.Tensor
    capacity: int
    pieces: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", most_pieces(self.capacity))


def fits(pool: LayerPool, group: int) -> bool:
    """Return whether the kernels can attend in a layer with ``group`` query heads to a KV head.

    They cannot where a layer slides, where a codec has no :class:`~scissorhands.codec.base.Layout`, or where a signal
    needs more of a query than its attention.
    """
    return (
        not pool.window
        and pool.head_dim in _HEAD_DIMS
        and pool.dtype in _TYPES
        and group <= _MOST_GROUP
        and None not in pool.layouts
        and {type(signal) for signal in pool.signals} <= SIGNALS
    )


def attend(pool: LayerPool, span: Span, new: NewTokens, *, observe: bool) -> torch.Tensor:
    """Do for one new token a row what :func:`scissorhands.attention.attend` does; the layer fits."""
    places = Places(
        table_of(pool, span.rows, pool.keys.device),
        span.slot_index.squeeze(1),
        span.positions.squeeze(1),
        pool.positions.shape[2],
    )
    with torch.cuda.device_of(new.query):  # type: ignore[no-untyped-call]
        return attend_at(pool, places, new, observe=observe)


def attend_at(pool: LayerPool, places: Places, new: NewTokens, *, observe: bool) -> torch.Tensor:
    """Append a token to each row, attend to its slots, and gather evidence. Nothing is read back from the device.

    The device is the current one.

    Args:
        pool: A layer that fits: any that is like those of the rows, but for where it lies and its capacity.
        places: Where the rows are.
        new: The new tokens, one a row.
        observe: Whether the evidence should count these queries.

    Returns:
        ``[R, query_heads, 1, head_dim]``.
    """
    kernel = kernel_of(pool)
    rows, query_heads, _, head_dim = new.query.shape
    group = query_heads // kernel.heads
    _append(kernel, pool.codec, places, new)
    queries = new.query.reshape(rows, kernel.heads, group, head_dim)
    if pool.codec is not None:
        queries = pool.codec.keys.project(queries)
    scratch = queries.new_empty(rows, kernel.heads, group, places.capacity, dtype=torch.float32)
    tops = torch.empty(rows, kernel.heads, places.pieces, group, dtype=torch.float32, device=queries.device)
    totals = torch.empty_like(tops)
    sums = torch.empty(*tops.shape, head_dim, dtype=torch.float32, device=queries.device)
    output = torch.empty_like(queries, dtype=new.query.dtype if pool.codec is None else torch.float32)
    grid = (rows * kernel.heads, places.pieces)
    shapes: dict[str, Any] = {
        "heads": kernel.heads,
        "group": group,
        "padded": max(_LEAST_GROUP, triton.next_power_of_2(group)),
        "head_dim": head_dim,
        "block": min(128, _BLOCK // head_dim),
    }
    product = torch.float32 if _INTERPRETED else kernel.dtype
    decode.attend_split[grid](
        places.table, places.slots, queries.contiguous(), scratch, tops, totals, sums, new.scaling, rows,
        places.pieces, places.capacity, **shapes, kind=_TYPES[kernel.dtype], product=_TYPES[product],
        key_bits=kernel.keys.bits, key_group=kernel.keys.group, key_bend=kernel.keys.bend,
        value_bits=kernel.values.bits, value_group=kernel.values.group, value_bend=kernel.values.bend,
        weighted=kernel.weighted,
    )  # fmt: skip
    decode.finish[grid](
        places.table, places.slots, places.steps, scratch, tops, totals, sums, output, rows, places.pieces,
        places.capacity, kernel.half, **shapes, observe=observe, low=kernel.low, window=kernel.window,
        last=kernel.last,
    )  # fmt: skip
    if pool.codec is not None:
        output = pool.codec.values.restore(output).to(new.query.dtype)
    return output.view(rows, query_heads, 1, head_dim)


def _append(kernel: Kernel, codec: LayerCodec | None, places: Places, new: NewTokens) -> None:
    keys, values = new.keys, new.values
    if codec is not None:
        keys, values = codec.keys.encode_rows(keys), codec.values.encode_rows(values)
    widths = keys.shape[-1], values.shape[-1]
    decode.append[(keys.shape[0] * kernel.heads,)](
        places.table, places.slots, places.steps, keys.contiguous(), values.contiguous(), keys.shape[0],
        heads=kernel.heads, key_width=widths[0], value_width=widths[1],
        padded=triton.next_power_of_2(max(widths)), kind=_TYPES[kernel.dtype] if codec is None else tl.uint8,
    )  # fmt: skip


def kernel_of(pool: LayerPool) -> Kernel:
    """Return what the kernels of a layer that fits are compiled for."""
    kinds = {type(signal) for signal in pool.signals}
    halves = [signal.half for signal in pool.signals if isinstance(signal, LowCount | WindowMass)]
    keys, values = pool.layouts
    assert keys is not None
    assert values is not None
    return Kernel(
        pool.keys.shape[1], pool.head_dim, pool.dtype, keys, values, max(halves, default=1),
        LowCount in kinds, WindowMass in kinds, LastAttention in kinds, Weight in kinds,
    )  # fmt: skip
