"""Attention of one new token a row: the step that decoding repeats.

What :func:`scissorhands.attention.attend` does for any number of tokens and any layer, in as few operations as one
token allows, for layers whose slots are as they are and whose evidence is mass alone. One index a pass says for all
layers where the new tokens go; of uneven rows only the last slots are hidden; the product itself scales the scores.

The rows and KV heads of a layer are told apart by nothing here: R rows of H heads are R H *lanes* of slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from scissorhands import kernels
from scissorhands.layer_pool import LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.row import Row


class Lanes(NamedTuple):
    """Where the new tokens of adjacent rows go in one layer of their pool, and what they see; N is rows times heads.

    Args:
        first: The first lane, counted over all rows of the pool.
        newest: ``[N]`` int64, slot of the new token: each lane uses its slots up to that one.
        slots: ``[N]`` int64, the same, counted over all slots of the layer.
        positions: ``[N]`` int32, true positions of the new tokens.
        extent: Slots that the longest lane uses.
        hidden: ``[N, 1, w]`` bool, which of the last ``w`` slots of the extent a lane does not use; None if all are
            equally long.
    """

    first: int
    newest: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    extent: int
    hidden: torch.Tensor | None


def lanes_of(rows: Sequence[Row], device: torch.device) -> list[Lanes]:
    """Return the lanes of adjacent rows of one pool, layer by layer of the pool."""
    pool = rows[0].pool
    heads, first, count = pool.kv_heads, rows[0].index, len(rows)
    lengths = np.array([row.lengths for row in rows]).T.repeat(heads, axis=1)  # [layers, N]
    lane = first * heads + np.arange(count * heads)
    capacities = np.array(rows[0].grant.layer_slots)[:, None]
    newest, index = (torch.from_numpy(array).to(device).unbind() for array in (lengths, lengths + lane * capacities))
    steps = np.array([row.step for row in rows], dtype=np.int32).repeat(heads)
    positions = torch.from_numpy(steps).to(device)
    # The rows of a pool differ in length by the tokens since their evictions, in most layers by the same.
    behind = lengths.max(axis=1, keepdims=True) - lengths
    masks: dict[bytes, torch.Tensor | None] = {}
    found = []
    for layer, own in enumerate(behind):
        key = own.tobytes()
        if key not in masks:
            masks[key] = _hidden(own, device)
        extent = int(lengths[layer].max()) + 1
        found.append(Lanes(int(lane[0]), newest[layer], index[layer], positions, extent, masks[key]))
    return found


def _hidden(behind: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor | None:
    """Return which of the last slots those lanes do not use that are ``behind`` ``[N]`` the longest."""
    width = int(behind.max())
    if not width:
        return None
    hidden = np.arange(width)[::-1] < behind[:, None]
    return torch.from_numpy(hidden).to(device).unsqueeze(1)


def fits(pool: LayerPool, new: NewTokens) -> bool:
    """Return whether new tokens are one a row, over slots as they are and mass alone, and no kernel takes them."""
    return (
        new.query.shape[2] == 1
        and not pool.window
        and pool.codec is None
        and len(pool.signals) == 1
        and not kernels.fits(pool, new)
    )


@torch.no_grad()  # The pool outlives the pass, and would keep all passes' graphs alive.
def attend_one(pool: LayerPool, lanes: Lanes, new: NewTokens, *, observe: bool) -> torch.Tensor:
    """Append one token to each row, attend to what the layer holds, and add to the mass.

    Args:
        pool: The layer's slots.
        lanes: Where the tokens go.
        new: The new tokens, which fit (:func:`fits`).
        observe: Whether the mass should count these queries; False if it already does.

    Returns:
        ``[R, query_heads, 1, head_dim]``.
    """
    keys, values = pool.keys.flatten(0, 1), pool.values.flatten(0, 1)
    _, capacity, head_dim = keys.shape
    pool.append_one(lanes.slots, lanes.positions, new.keys.reshape(-1, head_dim), new.values.reshape(-1, head_dim))
    count = len(lanes.newest)
    place = slice(lanes.first, lanes.first + count)
    query = new.query.reshape(count, -1, head_dim)
    output, received = attend_lanes(query, keys[place], values[place], lanes, new.scaling)
    if observe:
        mass = pool.states[0].view(-1, capacity)[place, : lanes.extent]
        mass.add_(received, alpha=1 / query.shape[1])
    return output.view(new.query.shape)


def attend_lanes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lanes: Lanes, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to lanes of slots that hold the new tokens already.

    Args:
        query: ``[N, group, head_dim]``.
        keys: ``[N, B, head_dim]``.
        values: ``[N, B, head_dim]``.
        lanes: Which of the slots each lane uses.
        scaling: Factor on the scores.

    Returns:
        ``[N, group, head_dim]``, and ``[N, extent]`` float32, the attention that each slot received, summed over the
        group.
    """
    extent = lanes.extent
    scores = query.new_empty(*query.shape[:2], extent)
    scores.baddbmm_(query, keys[:, :extent].mT, beta=0, alpha=scaling)
    if lanes.hidden is not None:
        scores[..., -lanes.hidden.shape[-1] :].masked_fill_(lanes.hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.bmm(weights.to(values.dtype), values[:, :extent]), weights.sum(dim=1)
