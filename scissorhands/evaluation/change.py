"""What compression does to attention: how much each query's attention to each token changes under a budget.

The paper (Liu et al., NeurIPS 2023, arXiv 2305.17118, section 5) compares attention before and after compression by the
relative change ``(compressed - full) / full``: -1 is a token that was dropped, 0 one whose attention is as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.evaluation.perplexity import feed
from scissorhands.evaluation.recorder import Recorder, attach
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.row import Row
from scissorhands.signals import Observation

# Bins of the histogram: relative changes below and above go to the first and the last.
EDGES = np.linspace(-1, 2, 61)

Counts = npt.NDArray[np.float64]


class Latest(Recorder):
    """Keeps the attention of the newest block of queries.

    Attributes:
        probabilities: ``[R, kv_heads, a, n]`` float32, the group's mean.
    """

    probabilities: torch.Tensor

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Replace what was kept."""
        del state
        self.probabilities = seen.probabilities


@dataclass(frozen=True)
class Change:
    """Relative changes of attention, over the pairs of a query and a token to which the full cache attends.

    Only pairs whose attention is above the average ``1/t`` are counted: below it a relative change is mostly noise.
    Only queries after the first eviction are.

    Args:
        pairs: ``[layers, kv_heads]``, how many pairs were counted.
        dropped: ``[layers, kv_heads]``, of how many the token was evicted: a relative change of -1.
        absolute: ``[layers, kv_heads]``, sum of the absolute relative changes of the others.
        histogram: ``[layers, bins]``, relative changes of all pairs, in the bins of :data:`EDGES`.
    """

    pairs: Counts
    dropped: Counts
    absolute: Counts
    histogram: Counts


def measure_change(
    model: PreTrainedModel,
    granted: Grant,
    tokens: torch.Tensor,
    progress: Callable[[int], object] = lambda _: None,
) -> Change:
    """Feed sequences to the full cache and to one under a budget, and compare each query's attention.

    Args:
        model: A model that attends through our attention.
        granted: What the compressed sequences are granted.
        tokens: ``[sequences, length]``.
        progress: Told how many more tokens are done.
    """
    shape, length = model_shape(model), tokens.shape[1]
    whole = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), shape, length)
    heads, bins = (shape.layers, shape.kv_heads), (shape.layers, len(EDGES) - 1)
    change = Change(np.zeros(heads), np.zeros(heads), np.zeros(heads), np.zeros(bins))
    for sequence in tokens:
        cache = ResidentCache(shape, model.dtype, model.device)
        rows = [cache.add_row(each, limit=length) for each in (whole, granted)]
        watched = [(row, _watch(row)) for row in rows]
        # Both rows are fed the same tokens in one pass, in the compressed row's blocks.
        for logits in feed(model, cache, rows, sequence.expand(2, -1)):
            if rows[1].epoch:
                for layer in range(shape.layers):
                    _compare(change, layer, *(_attention(row, latest, layer) for row, latest in watched))
            progress(logits.shape[1])
    return change


def _watch(row: Row) -> list[Latest]:
    latest = [Latest() for _ in row.pool.layers]
    for pool, recorder in zip(row.pool.layers, latest, strict=True):
        attach(pool, recorder)
    return latest


def _attention(row: Row, latest: list[Latest], layer: int) -> torch.Tensor:
    """Return what the newest queries gave each position, ``[kv_heads, a, tokens]``; -1 where a token is evicted."""
    spread = []
    # A layer is held in one part, or, with budgets by head, in one for each of its heads.
    for part in row.pool.parts(layer):
        probabilities = latest[part].probabilities[0]
        heads, queries, slots = probabilities.shape
        positions = row.pool.layers[part].positions[row.index, :, :slots].long()
        everywhere = probabilities.new_full((heads, queries, row.step), -1)
        spread.append(everywhere.scatter_(2, positions.unsqueeze(1).expand(-1, queries, -1), probabilities))
    return torch.cat(spread)


def _compare(change: Change, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
    """Count one block of queries: attention ``[kv_heads, a, n]`` of the full cache and of the compressed one."""
    queries, length = before.shape[1:]
    seen = torch.arange(length - queries + 1, length + 1, device=before.device).view(1, -1, 1)
    pivotal = before > 1 / seen
    for head in range(before.shape[0]):
        old, new = before[head][pivotal[head]], after[head][pivotal[head]]
        gone = new < 0
        relative = torch.where(gone, -1, (new - old) / old).double().cpu().numpy()
        change.pairs[layer, head] += len(relative)
        change.dropped[layer, head] += int(gone.sum())
        change.absolute[layer, head] += np.abs(relative[~gone.cpu().numpy()]).sum()
        change.histogram[layer] += np.histogram(relative.clip(EDGES[0], EDGES[-1]), EDGES)[0]
