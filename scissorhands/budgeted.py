"""The cache for use inside a transformers program, without any service.

::

    cache = BudgetedCache(model, BudgetRequest.tokens(256))
    model.generate(**inputs, cache=cache, max_new_tokens=64)

A prompt may come in one forward pass: each layer reads it chunk by chunk and evicts in between, so that the cache never
holds more than its budget. Each row of a left-padded batch follows the chunk grid of its own tokens, so that it keeps
what it would keep alone.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from scissorhands.attention import attend
from scissorhands.budget import BudgetRequest, Grant, slots_to_drop
from scissorhands.cache import ResidentCache
from scissorhands.calibrated import Calibrated
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import EXACT
from scissorhands.grant import PolicyRequest, grant
from scissorhands.new_tokens import NewTokens
from scissorhands.policies import get_policy
from scissorhands.probe import model_shape, probe
from scissorhands.row import Row
from scissorhands.slots import Slots
from scissorhands.snapshot import Snapshot
from scissorhands.span import Span
from scissorhands.view import StepView

DEFAULT_POLICY = PolicyRequest("scissorhands")
NOT_CALIBRATED = Calibrated()


@dataclass(frozen=True)
class _Chunk:
    """Tokens of a chunk of a prompt, and the slots that each layer of the row's pool drops before it."""

    tokens: int
    drops: list[int]


class BudgetedCache(StepView):
    """A transformers cache with a hard budget, for one batch.

    The model is switched to our attention implementation; switch it back with ``model.set_attn_implementation()``.

    Args:
        model: A causal language model.
        budget: What each row of the batch may hold.
        policy: The policy, by default the ``scissorhands`` policy with its default numbers.
        total_tokens: Prompt plus new tokens; needed for a budget given as a fraction or a compression.
        codec: Format in which slots are held, such as ``int4`` or ``planned``; see :func:`scissorhands.grant.grant`.
        calibrated: What was measured of the model, such as ``Calibrated.find(folder)``: its heads then share the budget
            by what eviction costs them, and calibrated formats work.

    Raises:
        InvalidRequestError: The budget or the policy is not valid.
        UnsupportedModelError: The model would not be served rightly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: BudgetRequest,
        policy: PolicyRequest = DEFAULT_POLICY,
        total_tokens: int | None = None,
        codec: str = EXACT,
        calibrated: Calibrated = NOT_CALIBRATED,
    ) -> None:
        super().__init__([])
        probe(model)
        shape = model_shape(model)
        self.grant: Grant = grant(budget, policy, shape, total_tokens, calibrated.profile, codec)
        self.evicted_slots = 0
        self.mass_dropped = 0.0
        self._policy = get_policy(self.grant.policy, self.grant.preset)
        self._resident = ResidentCache(shape, model.dtype, model.device, statistics=calibrated.statistics)
        self._seen = 0
        self._reading = False
        # Of each row, how it reads the prompt under way.
        self._chunks: list[list[_Chunk]] = []

    def window(self, layer: int) -> int:
        """Return the tokens that a query of a layer sees, before there are rows too."""
        return self._resident.shape.window(layer)

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Make room, append and attend in one layer.

        Raises:
            InvalidRequestError: The batch, its mask or its length is not what the cache can take, or the last prompt's
                pass failed halfway: the layers then hold different tokens, and only :meth:`reset` helps.
        """
        batch, _, incoming, _ = new.query.shape
        lengths = _real_tokens(mask, batch, incoming)
        if layer == 0:
            self._begin(incoming, lengths)
        if incoming == 1 and min(lengths) == 1:
            output = super().attend(layer, new)
        else:
            output = torch.zeros_like(new.query)
            for index, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
                rows, tokens = slice(index, index + 1), slice(incoming - length, incoming)
                own = new._replace(kinds=self.kinds).at(rows, tokens)
                if incoming > 1:
                    parts = row.pool.parts(layer)
                    read = [
                        self._read(index, part, share) for part, share in zip(parts, own.parts(len(parts)), strict=True)
                    ]
                    output[rows, :, tokens] = torch.cat(read, dim=1)
                elif length:
                    alone = StepView([row])
                    alone.kinds = own.kinds
                    output[rows, :, tokens] = alone.attend(layer, own)
        if layer == len(self) - 1:
            self._end(incoming, lengths)
        return output

    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors, measured on their storages."""
        return self._resident.allocated_bytes()

    def mass_dropped_share(self) -> float:
        """Return the share of the global layers' attention that lay on evicted slots up to their eviction."""
        heads = len(self._resident.shape.global_layers) * self._resident.shape.kv_heads
        queries = sum(row.step for row in self.rows)
        return self.mass_dropped / (queries * heads) if queries and heads else 0.0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen, padding included."""
        del layer_idx
        return self._seen

    def reset(self) -> None:
        """Forget everything and free the rows."""
        for row in self.rows:
            self._resident.remove_row(row)
        self.rows = []
        self.evicted_slots, self.mass_dropped, self._seen, self._reading = 0, 0.0, 0, False

    def _begin(self, incoming: int, lengths: list[int]) -> None:
        if self._reading:
            raise InvalidRequestError("cache", "the last forward pass failed halfway; call reset() and start again")
        if not self.rows:
            self.rows = [self._resident.add_row(self.grant) for _ in lengths]
        if len(lengths) != len(self.rows):
            raise InvalidRequestError("batch", f"the cache was made for {len(self.rows)} rows, got {len(lengths)}")
        self._spans.clear()
        self._reading = incoming > 1
        self._chunks = [_chunks(row, length) for row, length in zip(self.rows, lengths, strict=True)]
        if incoming == 1:
            self._make_room_for_one([row for row, length in zip(self.rows, lengths, strict=True) if length])

    def _end(self, incoming: int, lengths: list[int]) -> None:
        for row, length, chunks in zip(self.rows, lengths, self._chunks, strict=True):
            if incoming == 1:
                row.advance(length)
            else:
                row.step += length
                row.epoch += sum(any(chunk.drops) for chunk in chunks)
                row.prompt = row.step if length else row.prompt
        self._seen += incoming
        self._reading = False

    def _make_room_for_one(self, rows: list[Row]) -> None:
        for row in rows:
            eviction = self._resident.prepare_decode(row)
            if eviction:
                self._count(*eviction.layers)

    def _read(self, index: int, layer: int, new: NewTokens) -> torch.Tensor:
        """Let one layer of a row's pool read a prompt, or a part of one, chunk by chunk."""
        row = self.rows[index]
        row.pending = None  # A snapshot that decoding took counted on single tokens.
        pool, slots = row.pool.layers[layer], row.grant.layer_slots[layer]
        outputs, done = [], 0
        for chunk in self._chunks[index]:
            step = row.step + done
            if chunk.drops[layer]:
                self._evict_layer(row, layer, step, chunk)
            span = Span(slice(row.index, row.index + 1), (row.lengths[layer],), (step,), chunk.tokens, pool.keys.device)
            own = new.at(slice(None), slice(done, done + chunk.tokens))
            outputs.append(attend(pool, span, own, observe=True))
            row.lengths[layer] = min(row.lengths[layer] + chunk.tokens, slots)
            done += chunk.tokens
        return torch.cat(outputs, dim=2) if outputs else new.query

    def _evict_layer(self, row: Row, layer: int, step: int, chunk: "_Chunk") -> None:
        # Layers are decided apart, so one layer's plan is the same here as within a whole row's.
        evidence = row.pool.layers[layer].evidence(row.index, row.lengths[layer], step)
        prompt = step if step > row.step else row.prompt
        snapshot = Snapshot(row.epoch, step, ahead=0, incoming=chunk.tokens, layers=(evidence,), prompt=prompt)
        parameters = row.grant.parameters.within(row.grant.layer_slots[layer])
        keep = self._policy.keep(evidence, chunk.drops[layer], parameters, snapshot)
        self._count(*self._resident.drop(row, [keep], [layer]))

    def _count(self, *layers: Slots) -> None:
        self.evicted_slots += sum(taken.positions.numel() for taken in layers)
        self.mass_dropped += sum(float(taken.mass.sum()) for taken in layers)


def _chunks(row: Row, tokens: int) -> list[_Chunk]:
    """Return the chunks in which a row reads ``tokens`` more.

    Layers read one after the other, but when they evict depends on all layers' budgets; it depends on no evidence, so
    it is known before.
    """
    grant, chunks, done = row.grant, list[_Chunk](), 0
    governed = [not pool.window for pool in row.pool.layers]
    lengths = [length * own for length, own in zip(row.lengths, governed, strict=True)]
    while done < tokens:
        size = min(grant.parameters.chunk - (row.step + done) % grant.parameters.chunk, tokens - done)
        drops = slots_to_drop(lengths, grant.layer_slots, grant.parameters, size)
        chunks.append(_Chunk(size, drops))
        lengths = [(n - drop + size) * own for n, drop, own in zip(lengths, drops, governed, strict=True)]
        done += size
    return chunks


def _real_tokens(mask: torch.Tensor | None, batch: int, incoming: int) -> list[int]:
    """Return how many of each row's new tokens are not padding.

    Raises:
        InvalidRequestError: The mask is not two-dimensional, or padding follows a token.
    """
    if mask is None:
        return [incoming] * batch
    if mask.dim() != 2:  # noqa: PLR2004 - batch and tokens
        raise InvalidRequestError("attention_mask", f"must be [batch, tokens], got {mask.dim()} dimensions")
    new = mask[:, -incoming:].bool()
    if bool((new[:, 1:] < new[:, :-1]).any()):
        raise InvalidRequestError("attention_mask", "padding must be on the left: set tokenizer.padding_side='left'")
    counts: list[int] = new.sum(dim=1).tolist()
    return counts
