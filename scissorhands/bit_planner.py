"""Slots and bits together: how many slots each KV head gets within some bytes, and in how many bits they are held.

Both have a measured price: what a head loses when it keeps a share of its slots, and what it loses when its keys or
values are stored in fewer bits (:class:`~scissorhands.profile.Profile`). The losses are small, so they are added. For
every head all combinations become points of bytes and loss; pieces of the heads' lower convex hulls are then bought,
the steepest first, until the bytes are spent. That is bit allocation as in coding (Shoham and Gersho 1988), with tokens
as one more dimension; arXiv 2607.08032 frames the cache in the same way, rate against distortion.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from scissorhands.budget import ModelShape
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import parse
from scissorhands.profile import KEY_BITS, LEAST_SHARE, VALUE_BITS, Profile, hull_corners, losses_at

# Sizes that are tried for each head and format, evenly spaced.
_STEPS = 48


@dataclass(frozen=True)
class HeadPlan:
    """What one KV head gets.

    Args:
        slots: Its B.
        codec: Format of its slots.
    """

    slots: int
    codec: str


@lru_cache(maxsize=64)
def plan_bits(
    profile: Profile,
    shape: ModelShape,
    bytes_: int,
    evidence: int,
    equal: int,
    least: int,
    total: int,
) -> tuple[HeadPlan, ...]:
    """Choose slots and bits of the KV heads of all global layers.

    Args:
        profile: The losses.
        shape: The model's sizes.
        bytes_: What all the heads may take together.
        evidence: Bytes of evidence of a slot.
        equal: Slots of each head if all got as many, in four bits; no head gets less than half of it.
        least: The fewest slots of any head.
        total: The sequence's length.

    Returns:
        What each head gets, layer by layer; together at most ``bytes_``.

    Raises:
        InvalidRequestError: The profile has no losses of bits, or the bytes do not hold the smallest choice.
    """
    if not profile.bits:
        raise InvalidRequestError("profile", "does not tell what fewer bits cost: run scissorhands calibrate again")
    heads = tuple(layer * shape.kv_heads + head for layer in shape.global_layers for head in range(shape.kv_heads))
    low = min(total, max(least, math.ceil(equal * LEAST_SHARE)))
    sizes = np.unique(np.linspace(low, total, _STEPS).astype(np.int64))
    evicting = losses_at(profile, heads, sizes / total)
    evicting[:, sizes == total] = 0.0
    bits = np.array(profile.bits).reshape(-1, len(KEY_BITS) + len(VALUE_BITS))[list(heads)]
    names = [f"klt:k{key:g}v{value:g}" for key, value in product(KEY_BITS, VALUE_BITS)]
    widths = [parse(name).slot_bytes(shape.head_dim, shape.element_bytes) + evidence for name in names]
    storing = (bits[:, : len(KEY_BITS), None] + bits[:, None, len(KEY_BITS) :]).reshape(len(heads), len(names))
    points = np.multiply.outer(np.array(widths), sizes).ravel()
    order = np.argsort(points, kind="stable")
    choices, pieces = [], []
    for head in range(len(heads)):
        losses = (storing[head][:, None] + evicting[head][None]).ravel()
        corners = hull_corners(points[order], losses[order])
        choices.append([order[corner] for corner in corners])
        for step, (start, end) in enumerate(zip(choices[-1][:-1], choices[-1][1:], strict=True)):
            cost = int(points[end] - points[start])
            pieces.append(((losses[end] - losses[start]) / cost, head, step + 1, cost))
    left = bytes_ - sum(int(points[choice[0]]) for choice in choices)
    if left < 0:
        smallest = bytes_ - left
        raise InvalidRequestError("budget.bytes", f"too small: the smallest plan takes {smallest} bytes, got {bytes_}")
    taken = [0] * len(heads)
    for _, head, step, cost in sorted(pieces):
        # A head's pieces come in order, as its hull is convex; one that does not fit leaves no room for its later ones.
        if cost <= left and taken[head] == step - 1:
            taken[head], left = step, left - cost
    found = []
    for head, step in enumerate(taken):
        codec, size = divmod(int(choices[head][step]), len(sizes))
        found.append(HeadPlan(int(sizes[size]), names[codec]))
    return tuple(found)
