"""Views: what one forward pass of a transformers model sees of the resident cache."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import torch
from transformers import Cache

from scissorhands.attention import adjacent_runs, attend, tag
from scissorhands.errors import EngineError, InvalidRequestError
from scissorhands.kernels import cpu_launch
from scissorhands.kernels.cpu_launch import Places
from scissorhands.new_tokens import NewTokens
from scissorhands.row import Row
from scissorhands.span import Span

# Called with a layer of the model before it is attended to.
Before = Callable[[int], None]


class StepView(Cache):
    """A batch of rows in one forward pass; every row takes the same number of new tokens, none of them padding.

    Pass it to the model as ``cache=``. Whoever builds it has made room in the rows, and calls :meth:`commit` when the
    pass is through. A pass that failed halfway has changed nothing that counts, and can be repeated; but not one of
    several tokens over a sliding layer, which is refused.

    Args:
        rows: The rows in the order of the batch; adjacent rows of one pool are attended to together.
        before: Called before each layer, for what must be there first, or for what others may do in between: other
            rows may come, go and have a pass of their own. If it raises, the pass has failed.
    """

    def __init__(self, rows: Sequence[Row], before: Before | None = None) -> None:
        super().__init__(layers=[])
        self.rows = list(rows)
        self._before = before
        # ``[batch, a]`` uint8, kinds of the tokens of the pass under way; None if nobody tells (scissorhands.kinds).
        self.kinds: torch.Tensor | None = None
        self._spans: dict[tuple[int, int, tuple[int, ...], int], Span] = {}
        # Of each run of rows, by its pool, its first row and its size, where one new token of each goes.
        self._places: dict[tuple[int, int, int], Places] = {}

    def __len__(self) -> int:
        return self.rows[0].pool.model_layers if self.rows else 0

    @property
    def is_compileable(self) -> bool:
        """Never: shapes change from step to step."""
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tag the new keys, so that the attention function finds its way back here."""
        del args, kwargs
        return tag(key_states, self, layer_idx), value_states

    def window(self, layer: int) -> int:
        """Return the tokens that a query of a layer sees; 0 if it sees all that are kept."""
        if not self.rows:
            return 0
        pool = self.rows[0].pool
        return pool.layers[pool.parts(layer).start].window

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Append and attend in one layer, pool by pool."""
        del mask
        if self._before is not None:
            self._before(layer)
        if layer == 0:
            self._places.clear()
        new = new._replace(kinds=self.kinds)
        # Rows that already hold this pass, because it failed later on, are attended to apart from those that do not.
        places = [((id(row.pool), _held_parts(row, layer)), row.index) for row in self.rows]
        outputs = [
            self._attend_run(self.rows[start:end], layer, new.at(slice(start, end)))
            for start, end in adjacent_runs(places)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def commit(self, tokens: int) -> None:
        """Count ``tokens`` appended to every row."""
        for row in self.rows:
            row.advance(tokens)
        self._spans.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the most tokens that a row has seen, evicted ones and padding included."""
        del layer_idx
        return max((row.step for row in self.rows), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and offset of the mask: as if nothing had been evicted."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: a sequence may be longer than its budget."""
        del layer_idx
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """No layer is; ``generate`` would take a cache without layers for one and read a continued text twice."""
        return [False] * len(self)

    @property
    def is_sliding(self) -> list[bool]:
        """No layer is, as far as the sizes of masks go: windows are ours to keep."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is."""
        return [False] * len(self)

    @property
    def batch_size(self) -> int:
        """Rows in the batch; -1 before there are any."""
        return len(self.rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether the rows exist."""
        return bool(self.rows)

    @property
    def is_croppable(self) -> bool:
        """Never: what was evicted cannot be put back."""
        return False

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        """Refuse beam search."""
        del beam_idx
        raise InvalidRequestError("num_beams", "beam search is not supported by a cache that evicts; use num_beams=1")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse to take tokens back, as assisted generation would."""
        del tokens_to_remove
        raise InvalidRequestError("crop", "a cache that evicts cannot take tokens back; use no assistant model")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse to multiply rows."""
        del repeats
        raise InvalidRequestError("batch", "rows cannot be multiplied after the cache was filled; repeat the inputs")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refuse to select rows."""
        del indices
        raise InvalidRequestError("batch", "rows cannot be selected after the cache was filled; start a new cache")

    def _attend_run(self, rows: list[Row], layer: int, new: NewTokens) -> torch.Tensor:
        """Append and attend in one layer of adjacent rows of a pool; by head if they are held so."""
        pool, incoming, device = rows[0].pool, new.query.shape[2], new.query.device
        calls = pool.cpu_calls(layer) if cpu_launch.fits(new) else []
        parts = [call.layers for call in calls] or [range(part, part + 1) for part in pool.parts(layer)]
        outputs = []
        for index, (part, own) in enumerate(zip(parts, new.parts(len(parts)), strict=True)):
            observe = part.start >= rows[0].observed_layers
            if calls:
                output = cpu_launch.attend(calls[index], self._places_of(rows), own, observe=observe)
            else:
                span = self._span(rows, part.start, incoming, device)
                output = attend(pool.layers[part.start], span, own, observe=observe)
            outputs.append(output)
            for row in rows:
                row.observed_layers = max(row.observed_layers, part.stop)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _places_of(self, rows: list[Row]) -> Places:
        key = (id(rows[0].pool), rows[0].index, len(rows))
        if key not in self._places:
            self._places[key] = places_of(rows)
        return self._places[key]

    def _span(self, rows: list[Row], layer: int, incoming: int, device: torch.device) -> Span:
        lengths = tuple(row.lengths[layer] for row in rows)
        key = (id(rows[0].pool), rows[0].index, lengths, incoming)
        span = self._spans.get(key)
        if span is None:
            steps = tuple(row.step for row in rows)
            span = Span(slice(rows[0].index, rows[0].index + len(rows)), lengths, steps, incoming, device)
            self._spans[key] = span
        return span


def places_of(rows: Sequence[Row]) -> Places:
    """Return where one new token of each of adjacent rows of a pool goes.

    Raises:
        EngineError: A row has no room. The kernel would write beyond it.
    """
    if min(row.slack for row in rows) < 1:
        raise EngineError("a row has no room for a token")
    lengths = np.ascontiguousarray(np.array([row.lengths for row in rows]).T)
    return Places(rows[0].index, lengths, np.array([row.step for row in rows], np.int32))


def _held_parts(row: Row, layer: int) -> int:
    """Return how many parts of a layer already hold the forward pass under way."""
    parts = row.pool.parts(layer)
    return min(max(row.observed_layers - parts.start, 0), len(parts))
