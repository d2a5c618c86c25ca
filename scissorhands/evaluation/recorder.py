"""Recording what the queries of a forward pass give each token, beside what a policy's evidence holds."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.errors import UnsupportedModelError
from scissorhands.evaluation.perplexity import feed
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerPool
from scissorhands.probe import model_shape
from scissorhands.row import Row
from scissorhands.signals import Observation
from scissorhands.signals.base import Signal

# Bounds the memory of the full cache while it is recorded; changes no result.
_MOST_ROWS = 2


class Recorder(Signal):
    """A signal that no policy asks for: it keeps what it sees itself, and its state takes no bytes of a slot.

    Attach it with :func:`attach`; it is never part of a grant.
    """

    name = "recorder"

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return a state without elements."""
        return torch.zeros(rows, kv_heads, slots, 0, device=device)

    def value(self, state: torch.Tensor, *_: object) -> torch.Tensor:
        """Return the state as it is: nothing."""
        return state


class IntervalSums(Recorder):
    """Sums what the queries of each interval of positions give each token of a full cache.

    Args:
        edges: First position of each interval, ascending; the last one has no end. Queries before the first edge
            count nowhere.
        measure: What one query gives, ``[R, kv_heads, a, n]``, such as :func:`given`.
        sums: ``[R, kv_heads, intervals, length]`` float32, zeroed; where the sums are kept.
    """

    def __init__(
        self, edges: Sequence[int], measure: Callable[[Observation], torch.Tensor], sums: torch.Tensor
    ) -> None:
        self._edges = torch.tensor(edges, dtype=torch.long)
        self._measure = measure
        self._sums = sums

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Add the new queries to their intervals."""
        del state
        measured = self._measure(seen)
        queries = seen.span.steps[0] + torch.arange(measured.shape[2])
        interval = torch.searchsorted(self._edges, queries, right=True) - 1
        low, high = max(0, int(interval[0])), int(interval[-1])
        if high < 0:
            return
        # [intervals, a], 1 where a query is of an interval: the sum over queries is a product of matrices.
        member = (interval == torch.arange(low, high + 1).unsqueeze(1)).to(measured)
        self._sums[:, :, low : high + 1, : measured.shape[-1]] += torch.matmul(member, measured)


def given(seen: Observation) -> torch.Tensor:
    """Return the attention that each query gives each slot, ``[R, kv_heads, a, n]`` float32."""
    return seen.probabilities


def above_average(seen: Observation) -> torch.Tensor:
    """Return 1 where a query gives a slot more than the average attention ``1/t``, ``[R, kv_heads, a, n]`` float32."""
    averages = seen.averages(seen.span.steps)
    # A slot that a query does not see has probability 0.
    return (seen.probabilities > averages).float()


def attach(pool: LayerPool, recorder: Recorder) -> None:
    """Let a recorder see what one layer's queries give the rows that the pool holds now.

    Raises:
        UnsupportedModelError: The layer slides: nothing is learned about its slots.
    """
    if pool.window:
        raise UnsupportedModelError("attention is recorded of global layers only, and this model has layers that slide")
    rows, kv_heads, slots = pool.positions.shape
    pool.signals = (*pool.signals, recorder)
    pool.states.append(recorder.allocate(rows, kv_heads, slots, pool.positions.device))


def interval_sums(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    edges: Sequence[int],
    measure: Callable[[Observation], torch.Tensor] = given,
    progress: Callable[[int], object] = lambda _: None,
    finished: Callable[[int, Row], object] = lambda _index, _row: None,
) -> list[torch.Tensor]:
    """Feed sequences to the model with all of its cache, and sum what queries give tokens.

    Args:
        model: A model that attends through our attention.
        tokens: ``[sequences, length]``.
        edges: First position of each interval.
        measure: What one query gives.
        progress: Told how many more tokens are done.
        finished: Told each sequence's index and its row, while it still holds all keys and values.

    Returns:
        Of each layer, ``[sequences, kv_heads, intervals, length]`` float32.
    """
    shape, (sequences, length) = model_shape(model), tokens.shape
    granted = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), shape, length)
    sums = [
        torch.zeros(sequences, shape.kv_heads, len(edges), length, device=model.device) for _ in range(shape.layers)
    ]
    for start in range(0, sequences, _MOST_ROWS):
        batch = tokens[start : start + _MOST_ROWS]
        cache = ResidentCache(shape, model.dtype, model.device)
        rows = [cache.add_row(granted, limit=length) for _ in batch]
        for pool, layer in zip(rows[0].pool.layers, sums, strict=True):
            attach(pool, IntervalSums(edges, measure, layer[start : start + len(rows)]))
        for logits in feed(model, cache, rows, batch):
            progress(logits.shape[1] * len(rows))
        for index, row in enumerate(rows):
            finished(start + index, row)
    return sums
