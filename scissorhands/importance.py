"""What snapshots and plans tell about importance: the mass dropped, in all and lately, and whether importance persists.

The paper's premise is that tokens that mattered keep mattering. Persistence measures it: of the slots that two
successive snapshots share, the half that had received the most attention by the first is compared with the half that
received the most between the two. Chance gives one half, perfect persistence one.

A layer of which a snapshot has no slots, because it attends within a window of its own, is left out everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scissorhands.snapshot import Plan, Snapshot, pack


@dataclass(frozen=True)
class Tally:
    """What a row has evicted up to and with one plan.

    Args:
        epoch: Epoch of the snapshot.
        step: Tokens that the row had seen.
        evictions: Evictions so far.
        evicted_slots: Slots evicted so far, over all layers and heads.
        resident_slots: Slots of the snapshot that stay, over all layers and heads.
        mass_dropped: Attention that lay on evicted slots, in queries over all layers and heads.
        mass: All attention so far, in the same unit.
    """

    epoch: int
    step: int
    evictions: int
    evicted_slots: int
    resident_slots: int
    mass_dropped: float
    mass: float

    @property
    def mass_dropped_share(self) -> float:
        """Share of the attention that lay on evicted slots, between 0 and 1."""
        return self.mass_dropped / self.mass if self.mass > 0 else 0.0


@dataclass(frozen=True)
class Attention:
    """What is remembered of a snapshot until the next: its step; each layer's ``[kv_heads, n]`` positions and mass."""

    step: int
    positions: tuple[npt.NDArray[np.generic], ...]
    mass: tuple[npt.NDArray[np.float32], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(array.nbytes for array in (*self.positions, *self.mass))


def tally(snapshot: Snapshot, plan: Plan, before: Tally | None) -> Tally:
    """Count what ``plan`` evicts from ``snapshot``, on top of what was evicted before.

    A snapshot is a whole state, so the slots evicted before it follow from it alone. So does their mass, because every
    query gives each layer and head a mass of one; but a rounding error of it would show, so the sum of the plans is
    taken where none is missing.

    Args:
        snapshot: The snapshot.
        plan: Its plan.
        before: The tally of the last plan that was seen, None if none was.
    """
    decided = [(layer, keep) for layer, keep in zip(snapshot.layers, plan.keep, strict=True) if layer.length]
    seen = snapshot.step * sum(layer.positions.shape[0] for layer, _ in decided)
    dropped = sum(int(np.count_nonzero(~keep)) for _, keep in decided)
    resident = sum(layer.positions.size for layer, _ in decided)
    masses = [(layer.signals["mass"].astype(np.float64), keep) for layer, keep in decided]
    resident_mass = float(sum(mass.sum() for mass, _ in masses))
    dropped_mass = float(sum(mass[~keep].sum() for mass, keep in masses))
    evicted_mass = max(0.0, seen - resident_mass) if snapshot.epoch else 0.0
    if before is not None and before.evictions == snapshot.epoch:
        evicted_mass = before.mass_dropped
    return Tally(
        epoch=snapshot.epoch,
        step=snapshot.step,
        evictions=snapshot.epoch + (1 if dropped else 0),
        evicted_slots=seen - resident + dropped,
        resident_slots=resident - dropped,
        mass_dropped=evicted_mass + dropped_mass,
        mass=evicted_mass + resident_mass,
    )


def attention(snapshot: Snapshot) -> Attention:
    """Return what must be remembered of a snapshot to compare it with the next."""
    layers = [layer for layer in snapshot.layers if layer.length]
    # All layers at once: there may be one for each KV head.
    positions = pack(_flat([layer.positions for layer in layers]))
    mass = _flat([layer.signals["mass"] for layer in layers]).astype(np.float32, copy=False)
    ends = list(accumulate((layer.positions.size for layer in layers), initial=0))
    places = [(slice(*ends), layer.positions.shape) for ends, layer in zip(pairwise(ends), layers, strict=True)]
    return Attention(
        step=snapshot.step,
        positions=tuple(positions[place].reshape(shape) for place, shape in places),
        mass=tuple(mass[place].reshape(shape) for place, shape in places),
    )


def recent_mass_dropped(snapshot: Snapshot, plan: Plan, before: Attention | None) -> float:
    """Return what share of the latest attention went to the slots that a plan drops.

    The mass that :func:`tally` adds up is exact, but it weighs a slot by all that it ever received, most of it long
    ago. This weighs it by what it received lately. As far as importance persists, it is the share of their attention
    that the next queries lose; dropping at random would make it the share of the slots that are dropped.

    Args:
        snapshot: The snapshot that the plan answers.
        plan: The plan.
        before: What was remembered of the row's snapshot before; None if this is the first.

    Returns:
        Of the attention of the queries between the two snapshots (or since the start), in all layers and heads, the
        share that lay on slots that the plan drops; between 0 and 1.
    """
    decided = [(layer, keep) for layer, keep in zip(snapshot.layers, plan.keep, strict=True) if layer.length]
    queries = (snapshot.step - (before.step if before else 0)) * sum(len(keep) for _, keep in decided)
    if queries == 0:
        return 0.0
    # All layers at once: there may be one for each KV head.
    gone = np.flatnonzero(~_flat([keep for _, keep in decided]))
    received = _flat([layer.signals["mass"] for layer, _ in decided])[gone].astype(np.float64)
    if before is not None:
        old = _keys(before.positions)
        wanted = _keys([layer.positions for layer, _ in decided])[gone]
        place = np.minimum(np.searchsorted(old, wanted), old.size - 1)
        known = old[place] == wanted
        received[known] -= _flat(before.mass)[place[known]]
    # Masses are sums of many float32 numbers; their difference may be a rounding error below zero.
    return min(1.0, max(0.0, float(received.sum()) / queries))


def _flat(arrays: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[Any]:
    """Return the numbers of all arrays, one after the other."""
    return np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0, np.float32)


def _keys(positions: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.int64]:
    """Return numbers that tell the slots of all layers and heads apart; they ascend.

    Args:
        positions: ``[kv_heads, n]`` of each layer.
    """
    slots = [layer.shape[1] for layer in positions for _ in range(layer.shape[0])]
    heads = np.repeat(np.arange(len(slots), dtype=np.int64) << 32, slots)
    keys: npt.NDArray[np.int64] = heads + _flat(positions)
    return keys


def persistence(before: Attention, after: Attention) -> tuple[float, ...]:
    """Return of each layer how far importance persisted between two successive snapshots of a row.

    Returns:
        The overlap of the most attended halves, between 0 and 1, averaged over the heads, of each layer that has slots
        in a snapshot; empty when the snapshots have no two slots in common.
    """
    overlaps = []
    layers = zip(before.positions, before.mass, after.positions, after.mass, strict=True)
    for old_positions, old_mass, new_positions, new_mass in layers:
        heads = [_overlap(*head) for head in zip(old_positions, old_mass, new_positions, new_mass, strict=True)]
        measured = [overlap for overlap in heads if overlap is not None]
        if not measured:
            return ()
        overlaps.append(sum(measured) / len(measured))
    return tuple(overlaps)


def by_layer(overlaps: tuple[float, ...], heads: int) -> tuple[float, ...]:
    """Return the means of every ``heads`` overlaps: of each layer, if they are of each KV head."""
    return tuple(sum(overlaps[start : start + heads]) / heads for start in range(0, len(overlaps), heads))


def _overlap(
    old_positions: npt.NDArray[np.generic],
    old_mass: npt.NDArray[np.float32],
    new_positions: npt.NDArray[np.generic],
    new_mass: npt.NDArray[np.float32],
) -> float | None:
    _, old, new = np.intersect1d(old_positions, new_positions, assume_unique=True, return_indices=True)
    half = len(old) // 2
    if half == 0:
        return None
    attended = np.argsort(old_mass[old], kind="stable")[-half:]
    received = np.argsort(new_mass[new] - old_mass[old], kind="stable")[-half:]
    return len(np.intersect1d(attended, received, assume_unique=True)) / half
