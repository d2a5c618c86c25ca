"""Replaying a recorded sequence through the real cache: what each KV head's evictions cost.

The layers of a recording are the rows of a one-layer cache, so that many are replayed at once: policies decide a layer
from its own evidence alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from scissorhands.budget import Grant, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.calibration.fisher import Recording, full_attention
from scissorhands.evaluation.perplexity import MOST_ROWS, blocks
from scissorhands.new_tokens import NewTokens
from scissorhands.view import StepView

Losses = npt.NDArray[np.float64]


def one_layer(shape: ModelShape) -> ModelShape:
    """Return the sizes of one global layer, as it is replayed: in float32."""
    return replace(shape, layers=1, element_bytes=torch.float32.itemsize, layer_windows=())


def head_losses(
    recording: Recording,
    shape: ModelShape,
    grants: Sequence[Grant],
    device: torch.device,
    progress: Callable[[int], object] = lambda _: None,
) -> Losses:
    """Measure what evicting under each grant costs in each KV head, all else kept in full.

    Args:
        recording: A sequence in N global layers.
        shape: The sizes of one layer (:func:`one_layer`).
        grants: Budgets of one layer, for ``shape``.
        device: Where to replay.
        progress: Told how many more layers are replayed under one grant.

    Returns:
        ``[N, kv_heads, grants]``, nats per token, averaged over all positions.
    """
    found = []
    for start in range(0, len(recording.queries), MOST_ROWS):
        batch = slice(start, start + MOST_ROWS)
        queries, keys, values = (
            part[batch].to(device, torch.float32) for part in (recording.queries, recording.keys, recording.values)
        )
        full = full_attention(queries, keys, values)
        gradients = recording.gradients[:, batch].to(device, torch.float32)
        losses = []
        for grant in grants:
            changes = _replayed(queries, keys, values, recording.kinds, shape, grant).sub_(full)
            losses.append(expected(gradients, changes, shape))
            progress(len(queries))
        found.append(torch.stack(losses, dim=-1))
    result: Losses = torch.cat(found).double().cpu().numpy()
    return result


def _replayed(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kinds: torch.Tensor | None,
    shape: ModelShape,
    grant: Grant,
) -> torch.Tensor:
    """Return the outputs ``[N, query_heads, T, head_dim]`` under a grant, as decoding gives them."""
    cache = ResidentCache(shape, queries.dtype, queries.device)
    layers, total = len(queries), queries.shape[2]
    rows = [cache.add_row(grant, name=str(layer), limit=total) for layer in range(layers)]
    outputs = torch.empty_like(queries)
    for block in blocks(cache, rows, total):
        view = StepView(rows)
        view.kinds = None if kinds is None else kinds[:, block].expand(layers, -1)
        place = (slice(None), slice(None), block)
        outputs[place] = view.attend(0, NewTokens(queries[place], keys[place], values[place], scaling=1.0))
        view.commit(block.stop - block.start)
    return outputs


def expected(gradients: torch.Tensor, changes: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Return ``E[(g . d)^2] / 2``, ``[N, kv_heads]``: means over samples and positions, sums over groups."""
    steps = torch.einsum("snhtd,nhtd->snht", gradients, changes)
    costs = steps.square().mean(dim=(0, 3)) / 2
    return costs.view(len(costs), shape.kv_heads, shape.group).sum(dim=2)
