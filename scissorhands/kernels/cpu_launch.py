"""Calls the kernel of :mod:`scissorhands.kernels.cpu`: one new token of each of adjacent rows, in one layer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch

from scissorhands.codec.base import Layout
from scissorhands.kernels.cpu import Shape, kernel
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.new_tokens import NewTokens

_Arrays = tuple[npt.NDArray[np.generic], ...]


class Places(NamedTuple):
    """Where the new tokens of adjacent rows of a pool go.

    Args:
        first: The first row.
        lengths: ``[layers of the pool, R]`` int64, slots in use.
        steps: ``[R]`` int32, tokens that each row has seen.
    """

    first: int
    lengths: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int32]


class Call(NamedTuple):
    """What one call of the kernel goes over: layers of a pool, of one head each if there are several.

    Args:
        layers: Which of the pool's they are.
        keys: Of each ``[rows, H, B, ...]``; the memory is the layer's own, and stays so while the pool has its rows.
        values: The same.
        positions: The same.
        mass: The same.
        codec: What packs keys and values; None leaves them as they are.
        layouts: How they are packed.
    """

    layers: range
    keys: _Arrays
    values: _Arrays
    positions: _Arrays
    mass: _Arrays
    codec: LayerCodec | None
    layouts: tuple[Layout, Layout]


def calls_of(layers: Sequence[object], parts: range) -> list[Call]:
    """Return the calls that go over one layer of the model; none if the kernel cannot attend there.

    It can on the host, in float32, where nothing slides, mass is all the evidence, and a codec has a layout. Heads that
    are held one by one take one call, unless they are packed, each perhaps in its own way.

    Args:
        layers: The pool's layers.
        parts: Which of them hold the layer of the model.
    """
    pools = [layer for layer in (layers[part] for part in parts) if isinstance(layer, LayerPool) and _fits(layer)]
    if len(pools) < len(parts):
        return []
    if all(pool.codec is None for pool in pools):
        return [_call(pools, parts)]
    return [_call([pool], range(part, part + 1)) for part, pool in zip(parts, pools, strict=True)]


def fits(new: NewTokens) -> bool:
    """Return whether new tokens are one a row, in the host's memory and in float32."""
    return new.query.shape[2] == 1 and new.query.is_cpu and new.query.dtype == torch.float32


def attend(call: Call, places: Places, new: NewTokens, *, observe: bool) -> torch.Tensor:
    """Append one token to each row, attend to what the layers hold, and add to the mass.

    Args:
        call: The layers.
        places: Where the tokens go.
        new: The new tokens, those of the layers' heads.
        observe: Whether the mass should count these queries; False if it already does.

    Returns:
        ``[R, query_heads, 1, head_dim]``.
    """
    rows, query_heads, _, head_dim = new.query.shape
    query, keys, values = (states.squeeze(2) for states in new[:3])
    heads = keys.shape[1]
    if call.codec is not None:
        own = call.codec
        keys, values = own.keys.encode_rows(new.keys).squeeze(2), own.values.encode_rows(new.values).squeeze(2)
        query = own.keys.project(query.view(rows, heads, -1, head_dim)).float().reshape(query.shape)
    output = torch.empty(rows, query_heads, head_dim)
    threads = torch.get_num_threads()
    if threads > 1:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined] # Its stubs lack it.
    arrays = (states.contiguous().numpy() for states in (query, keys, values))
    kernel(Shape(head_dim, query_heads // heads, *call.layouts), threads)(
        *arrays, call.keys, call.values, call.positions, call.mass, places.first,
        places.lengths[call.layers.start : call.layers.stop], places.steps, np.float32(new.scaling), observe,
        output.numpy(),
    )  # fmt: skip
    if call.codec is not None:
        output = call.codec.values.restore(output.view(rows, heads, -1, head_dim))
    return output.view(new.query.shape)


def _fits(pool: LayerPool) -> bool:
    plain = pool.keys.is_cpu and pool.dtype == torch.float32 and len(pool.signals) == 1
    return plain and None not in pool.layouts


def _call(pools: Sequence[LayerPool], layers: range) -> Call:
    keys, values, positions, mass = zip(*map(_arrays, pools), strict=True)
    key_layout, value_layout = pools[0].layouts
    assert key_layout is not None
    assert value_layout is not None
    return Call(layers, keys, values, positions, mass, pools[0].codec, (key_layout, value_layout))


def _arrays(pool: LayerPool) -> Iterator[npt.NDArray[np.generic]]:
    for tensor in (pool.keys, pool.values, pool.positions, pool.states[0]):
        yield tensor.numpy()
