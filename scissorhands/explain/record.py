"""Running a prompt through the cache as serving would, greedily, and noting when each slot is dropped."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.cache import ResidentCache
from scissorhands.errors import EngineError
from scissorhands.explain.recording import Cut, Recording
from scissorhands.probe import model_shape
from scissorhands.row import Eviction, Row
from scissorhands.step import ModelStep


@torch.inference_mode()
def record(
    model: PreTrainedModel,
    grant: Grant,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_ids: frozenset[int] = frozenset(),
    progress: Callable[[Row], object] = lambda _: None,
) -> Recording:
    """Read a prompt on the chunk grid, then decode.

    Args:
        model: A model that attends through our attention (:func:`scissorhands.probe.probe`).
        grant: The budget and the policy's numbers.
        prompt: Token ids; at least one.
        max_new_tokens: Most tokens to generate; at least one.
        end_ids: Tokens that end the answer.
        progress: Told the row after every forward pass.

    Raises:
        EngineError: The model's logits are not finite.
    """
    step = ModelStep(model)
    cache = ResidentCache(model_shape(model), model.dtype, model.device)
    ids = list(prompt)
    # The last token is chosen, but never appended.
    row = cache.add_row(grant, limit=len(ids) + max_new_tokens - 1)
    notes = _Notes(cache, row, len(ids) + max_new_tokens - 1)
    while row.step < len(prompt):
        size = row.next_chunk(len(prompt) - row.step)
        notes.evicted(cache.prepare_prefill(row, size))
        logits = step([row], [ids[row.step : row.step + size]])
        progress(row)
    ids.append(_choose(logits))
    while ids[-1] not in end_ids and len(ids) < len(prompt) + max_new_tokens:
        notes.evicted(cache.prepare_decode(row))
        logits = step([row], [ids[-1:]])
        progress(row)
        ids.append(_choose(logits))
    notes.held()
    return Recording(
        ids=tuple(ids),
        prompt=len(prompt),
        grant=grant,
        shape=cache.shape,
        allocated_bytes=cache.allocated_bytes(),
        cuts=tuple(notes.cuts),
        dropped_at=notes.dropped_at[:, :, : row.step],
        mass=notes.mass[:, :, : row.step],
    )


class _Notes:
    """When each slot was dropped, and what it had received.

    Args:
        cache: The row's cache.
        row: The row.
        tokens: Most tokens that will be appended.
    """

    def __init__(self, cache: ResidentCache, row: Row, tokens: int) -> None:
        self._cache = cache
        self._row = row
        shape = (len(cache.shape.global_layers), cache.shape.kv_heads, tokens)
        # The pool's layers that evict, and which global layer and heads of the model each of them is.
        self._layers = row.pool.global_layers
        lanes = np.indices(shape[:2]).reshape(2, len(self._layers), row.pool.kv_heads, 1)
        self._lanes = list(zip(*lanes, strict=True))
        self.cuts: list[Cut] = []
        self.dropped_at = np.zeros(shape, np.int32)
        self.mass = np.zeros(shape, np.float32)

    def evicted(self, eviction: Eviction | None) -> None:
        """Note an eviction, if there was one."""
        if eviction is None:
            return
        self.cuts.append(Cut(eviction.step, eviction.phase.value, eviction.slots, eviction.mass()))
        for lane, layer in zip(self._lanes, self._layers, strict=True):
            slots = eviction.layers[layer]
            place = (*lane, slots.positions.cpu().numpy())
            self.dropped_at[place] = len(self.cuts)
            self.mass[place] = slots.mass.cpu().numpy()

    def held(self) -> None:
        """Note what the slots that are still held have received."""
        held = self._cache.snapshot(self._row, ahead=0, incoming=1, layers=self._layers)
        for lane, evidence in zip(self._lanes, held.layers, strict=True):
            self.mass[(*lane, evidence.positions)] = evidence.signals["mass"]


def _choose(logits: torch.Tensor) -> int:
    """Return the likeliest token of ``[1, vocabulary]`` logits."""
    if not logits.isfinite().all():
        raise EngineError("the model's logits are not finite; try --dtype float32")
    return int(logits[0].argmax())
