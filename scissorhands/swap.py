"""Swapping: recalled slots take the places of a row's least important ones, so its budget is what it was.

What goes out is chosen by the row's policy, as in an eviction: sinks and recent slots stay. And nothing goes out for
what the next tokens want less. It becomes a segment like any other, so nothing is lost. Recalled slots keep their true
positions and go where these belong.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scissorhands.cache import ResidentCache
from scissorhands.layer_pool import LayerPool
from scissorhands.policies import get_policy
from scissorhands.policies.base import Scores, lowest
from scissorhands.recall import Chosen, HeadSketch, allowance
from scissorhands.row import Row
from scissorhands.signals import Resident
from scissorhands.slots import LooseSlots, Slots


@dataclass(frozen=True)
class Swap:
    """What one swap took out of a row and put into it.

    Args:
        epoch: Epoch that the swap began.
        step: Tokens seen.
        layers: The slots taken out of each KV head, by layer, then by head: ``[1, d]`` each.
        keys: Their keys as the model knows them.
    """

    epoch: int
    step: int
    layers: tuple[Slots, ...]
    keys: tuple[torch.Tensor, ...]

    @property
    def slots(self) -> int:
        """Slots swapped, over all layers and heads."""
        return sum(layer.positions.numel() for layer in self.layers)

    def exact_keys(self) -> list[torch.Tensor]:
        """Return the keys as the model knows them."""
        return list(self.keys)


def sketch_of(row: Row, queries: Sequence[torch.Tensor], share: float) -> list[HeadSketch]:
    """Return what a row asks for, of each KV head; of sliding layers nothing.

    Args:
        row: The row.
        queries: Of each layer of the model, ``[query_heads, a, head_dim]``, scaled.
        share: Share of each head's budget that may be recalled.
    """
    kv_heads = row.pool.kv_heads * len(row.pool.parts(0))
    sketch = []
    for place, (layer, pool, own) in enumerate(_heads(row)):
        if pool.window:
            sketch.append(HeadSketch(np.zeros((0, 0), np.float16), np.zeros(0, np.int32), 0))
            continue
        asked = queries[place // kv_heads]
        group = asked.shape[0] // kv_heads
        head = place % kv_heads
        length, slots = row.lengths[layer], row.grant.layer_slots[layer]
        exempt = row.grant.parameters.within(slots).exempt
        sketch.append(
            HeadSketch(
                asked[head * group : (head + 1) * group].flatten(0, 1).half().cpu().numpy(),
                pool.positions[row.index, own, :length].cpu().numpy().copy(),
                allowance(share, slots, length, exempt),
            )
        )
    return sketch


def swap(cache: ResidentCache, row: Row, sketch: Sequence[HeadSketch], candidates: Mapping[int, LooseSlots]) -> Swap:
    """Choose among candidates, and put the chosen into a row in place of as many others.

    Args:
        cache: The row's cache.
        row: The row, between two forward passes. A snapshot in flight is forgotten.
        sketch: What the row asked for, as it is now.
        candidates: By KV head, counted over all layers: slots that it does not hold.

    Returns:
        What was taken out.
    """
    policy = get_policy(row.grant.policy, row.grant.preset)
    snapshot = cache.snapshot(row, ahead=0, incoming=0)

    @functools.cache  # The heads of a layer are ranked together.
    def ranks(layer: int) -> Scores:
        parameters = row.grant.parameters.within(row.grant.layer_slots[layer])
        return policy.ranks(snapshot.layers[layer], parameters, snapshot)

    taken, keys = [], []
    for place, ((layer, pool, head), asked) in enumerate(zip(_heads(row), sketch, strict=True)):
        victims = np.zeros(0, dtype=np.intp)
        if place in candidates and asked.allowance:
            held = pool.exact_keys(pool.keys[row.index, head, : row.lengths[layer]].unsqueeze(0), head)[0]
            coming, wanted, kept = _best(asked, candidates[place], held, pool, head)
            victims = np.flatnonzero(lowest(ranks(layer)[head : head + 1], len(coming.positions))[0])
            victims, coming = _worthwhile(victims, kept, coming, wanted)
        out = _taken(row, pool, head, torch.from_numpy(victims).to(cache.device))
        if victims.size:
            _put(row, pool, head, row.lengths[layer], victims, coming)
        taken.append(out)
        keys.append(pool.exact_keys(out.keys, head))
    row.pending = None
    row.epoch += 1
    return Swap(row.epoch - 1, row.step, tuple(taken), tuple(keys))


def _best(
    asked: HeadSketch, candidates: LooseSlots, held: torch.Tensor, pool: LayerPool, head: int
) -> tuple[LooseSlots, np.ndarray, np.ndarray]:
    """Return the candidates to which the queries would give the most, as many as may be recalled, the best first.

    Args:
        asked: The queries.
        candidates: The candidates.
        held: ``[n, head_dim]`` keys of the slots that the head holds, as the model knows them.
        pool: The layer's pool, and
        head: the head in it.

    Returns:
        The slots, the share of the queries' attention that each would get beside all slots here, and that of each held.
    """
    device = pool.keys.device
    loose = LooseSlots(*(part.to(device) for part in (candidates.positions, candidates.keys, candidates.values)))
    exact = pool.exact_keys(loose.keys.unsqueeze(0), head)[0]
    scores = torch.from_numpy(asked.queries).to(device).float() @ torch.cat([held, exact]).float().T
    shares = torch.softmax(scores, dim=1).mean(dim=0)
    kept, wanted = shares[: len(held)], shares[len(held) :]
    # Of equal ones those that came first.
    order = wanted.argsort(descending=True, stable=True)[: asked.allowance]
    return loose.at(order), wanted[order].cpu().numpy(), kept.cpu().numpy()


def _worthwhile(victims: Chosen, kept: np.ndarray, coming: LooseSlots, wanted: np.ndarray) -> tuple[Chosen, LooseSlots]:
    """Return as many victims and slots that come, the best of each, as each slot is wanted more than its victim."""
    ascending = victims[np.argsort(kept[victims], kind="stable")]
    count = int((wanted[: len(ascending)] > kept[ascending]).sum())
    return np.sort(ascending[:count]), coming.at(torch.arange(count, device=coming.positions.device))


def _heads(row: Row) -> Iterator[tuple[int, LayerPool, int]]:
    """Yield where each KV head of the model lies, by layer, then by head: layer of the pool, and head within that."""
    for layer, pool in enumerate(row.pool.layers):
        for head in range(row.pool.kv_heads):
            yield layer, pool, head


def _taken(row: Row, pool: LayerPool, head: int, slots: torch.Tensor) -> Slots:
    """Copy slots of one head."""
    if pool.window:
        nothing = pool.keys.new_zeros(1, 0, pool.keys.shape[-1])
        return Slots(nothing, nothing, pool.positions.new_zeros(1, 0), nothing[..., 0].float())
    tensors = (pool.keys, pool.values, pool.positions, pool.states[0])
    keys, values, positions, mass = (tensor[row.index, head, slots].unsqueeze(0) for tensor in tensors)
    return Slots(keys, values, positions, mass, packed=pool.codec is not None)


def _put(row: Row, pool: LayerPool, head: int, length: int, victims: Chosen, coming: LooseSlots) -> None:
    """Replace slots of one head, and bring all into the order of their positions."""
    used = (row.index, head, slice(length))
    device = pool.positions.device
    kept = torch.from_numpy(np.setdiff1d(np.arange(length), victims)).to(device)
    positions = coming.positions
    resident = Resident(pool.keys[used], pool.values[used], pool.positions[used], row.step)
    states = [
        signal.recalled(state[used], resident, positions)
        for signal, state in zip(pool.signals, pool.states, strict=True)
    ]
    order = torch.cat([resident.positions[kept], positions]).argsort()
    count = len(victims)
    for tensor, new in zip(
        pool.tensors(), (coming.keys[:count], coming.values[:count], positions, *states), strict=True
    ):
        own = tensor[used]
        tensor[used] = torch.cat([own[kept], new.to(own)])[order]
