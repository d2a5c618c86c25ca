"""How much of the attention that the full cache gives falls on tokens that a policy still holds."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.cache import ResidentCache
from scissorhands.codec.statistics import attached
from scissorhands.evaluation.perplexity import feed
from scissorhands.probe import model_shape
from scissorhands.row import Planner, Row

Shares = npt.NDArray[np.float64]


def lost(
    model: PreTrainedModel,
    granted: Grant,
    tokens: torch.Tensor,
    steps: list[int],
    between: list[torch.Tensor],
    planner: Planner | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> Shares:
    """Return the share of the full cache's attention that falls on tokens which a policy has evicted by then.

    Counted are the queries after the first eviction. What a policy evicts follows from its own cache, what attention a
    token would receive from the full one.

    Args:
        model: A model that attends through our attention.
        granted: What each sequence is granted.
        tokens: ``[sequences, length]``.
        steps: Tokens seen at each eviction (:func:`scissorhands.evaluation.oracle.eviction_steps`), at least one.
        between: Of each layer, ``[sequences, kv_heads, evictions, length]``: the attention that each token of the full
            cache receives between an eviction and the next.
        planner: Who plans; None: the policy of the grant.
        progress: Told how many more tokens are done.

    Returns:
        ``[sequences, layers, kv_heads]``, between 0 and 1.
    """
    shape, (sequences, length) = model_shape(model), tokens.shape
    cache = ResidentCache(shape, model.dtype, model.device, planner, statistics=attached(model))
    rows = [cache.add_row(granted, name=str(index), limit=length) for index in range(sequences)]
    mass = np.zeros((sequences, shape.layers, shape.kv_heads))
    done = evictions = 0
    for logits in feed(model, cache, rows, tokens):
        if rows[0].epoch > evictions:
            for index, row in enumerate(rows):
                for layer, received in enumerate(between):
                    mass[index, layer] += _evicted(row, layer, done, received[index, :, evictions])
            evictions = rows[0].epoch
        done += logits.shape[1]
        progress(logits.shape[1] * sequences)
    # Every query gives 1 in all.
    return mass / (length - steps[0])


def _evicted(row: Row, layer: int, step: int, received: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return ``[kv_heads]``, what the tokens before ``step`` that the row no longer holds have ``received``."""
    gone = torch.ones_like(received, dtype=torch.bool)
    gone[:, step:] = False
    # A layer is held in one part, or, with budgets by head, in one for each of its heads.
    parts = row.pool.parts(layer)
    for part, heads in zip(parts, gone.chunk(len(parts)), strict=True):
        positions = row.pool.layers[part].positions[row.index, :, : row.lengths[part]].long()
        heads.scatter_(1, positions, value=False)
    masses: npt.NDArray[np.float64] = received.masked_fill(~gone, 0).sum(dim=1, dtype=torch.float64).cpu().numpy()
    return masses
