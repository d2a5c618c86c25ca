"""A kernel for the processor: one new token a row attends to the slots in use, packed or not, and leaves its evidence.

Compiled by numba when it is first needed, for the processor at hand, and kept on disk where there is a place for it.
Each KV head of a row is a *lane*, decided from its own slots alone and summed in one order, so whatever else is in the
batch changes no number. A lane goes once over its keys and once over its values, and unpacks a vector where it is read.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from scissorhands.codec.base import Layout
from scissorhands.compiled import compiled
from scissorhands.kernels.cpu_vectors import scale_of, softmax, vector_of


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Args:
        head_dim: Elements of a key.
        group: Query heads to a KV head.
        keys: How keys are packed.
        values: How values are.
    """

    head_dim: int
    group: int
    keys: Layout
    values: Layout


@lru_cache(maxsize=256)
def kernel(shape: Shape, threads: int) -> Callable[..., None]:
    """Return the kernel for a shape, on one thread or on several.

    It is called as ``attend(query, new_keys, new_values, keys, values, positions, mass, first, lengths, steps, scaling,
    observe, output)``:

    - query: ``[R, P H group, head_dim]`` float32, of P parts of H KV heads each, in the basis of the keys.
    - new_keys, new_values: ``[R, P H, width]``, as they are stored.
    - keys, values: P arrays ``[rows, H, B, width]``, float32 or packed uint8; B may differ from part to part.
    - positions, mass: P arrays ``[rows, H, B]``, int32 and float32.
    - first: The row of these that is the batch's first.
    - lengths: ``[P, R]`` int64, slots in use of each part before the new token.
    - steps: ``[R]`` int32, tokens that each row has seen.
    - scaling: Factor on the scores, float32.
    - observe: Whether the mass should count these queries.
    - output: ``[R, P H group, head_dim]`` float32, written, in the basis of the values.
    """
    found: Callable[..., None] = _kernel(shape.head_dim, shape.group, *shape.keys, *shape.values, threads > 1)
    return found


def _kernel(
    head_dim: int,
    group: int,
    key_bits: int,
    key_group: int,
    key_bend: float,
    value_bits: int,
    value_group: int,
    value_bend: float,
    parallel: bool,
) -> Any:
    share = np.float32(1 / group)
    zero = np.float32(0)

    def attend(
        query: Any,
        new_keys: Any,
        new_values: Any,
        keys: Any,
        values: Any,
        positions: Any,
        mass: Any,
        first: int,
        lengths: Any,
        steps: Any,
        scaling: Any,
        observe: bool,
        output: Any,
    ) -> None:
        parts = len(keys)
        heads = keys[0].shape[1]
        rows = lengths.shape[1]
        for lane in prange(rows * parts * heads):
            row = lane // (parts * heads)
            at = lane % (parts * heads)
            part, head = at // heads, at % heads
            held = first + row
            slot = lengths[part, row]
            own_keys, own_values = keys[part][held, head], values[part][held, head]
            own_keys[slot] = new_keys[row, at]
            own_values[slot] = new_values[row, at]
            positions[part][held, head, slot] = steps[row]
            used = slot + 1
            queries = query[row, at * group : (at + 1) * group]
            weights = np.empty((group, used), np.float32)
            buffer = np.empty(head_dim, np.float32)
            for index in range(used):
                key = vector_of(own_keys[index], buffer, key_bits, key_group, key_bend)
                factor = scaling * scale_of(own_keys[index], key_group)
                for member in range(group):
                    total = zero
                    for element in range(head_dim):
                        total += queries[member, element] * key[element]
                    weights[member, index] = total * factor
            softmax(weights)
            if observe:
                received = mass[part][held, head]
                for index in range(used):
                    total = zero
                    for member in range(group):
                        total += weights[member, index]
                    received[index] += total * share
            summed = output[row, at * group : (at + 1) * group]
            for member in range(group):
                for element in range(head_dim):
                    summed[member, element] = zero
            for index in range(used):
                value = vector_of(own_values[index], buffer, value_bits, value_group, value_bend)
                factor = scale_of(own_values[index], value_group)
                for member in range(group):
                    weight = weights[member, index] * factor
                    for element in range(head_dim):
                        summed[member, element] += weight * value[element]

    return compiled(attend, parallel=parallel)
