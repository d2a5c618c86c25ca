"""Decode steps of static shape, captured as CUDA graphs and replayed: one launch instead of some hundred.

What changes from step to step lies in one buffer of fixed place: tokens, positions, the slots that they go to, and the
addresses of the rows' tensors. So rows join, leave and move without a new graph. A batch is padded to a power of two;
a padding row has no slot, so the kernels write nothing for it, and its logits are dropped. Where the kernels are
interpreted instead (``TRITON_INTERPRET=1``), the same step runs without a graph.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from scissorhands import kernels
from scissorhands.attention import tag
from scissorhands.kernels.table import CAPACITY, FIELDS, NOWHERE, entry
from scissorhands.new_tokens import NewTokens
from scissorhands.pool import Pool
from scissorhands.row import Row
from scissorhands.view import places_of

_LOG = logging.getLogger(__name__)
# Graphs that are kept; the one that was used least recently goes.
_MOST_STEPS = 8
# Passes before a capture, in which kernels are compiled and libraries allocate what they need.
_WARM_UPS = 2


class _Kind(NamedTuple):
    """What a step is captured for.

    Args:
        parts: What the kernels of each layer of the rows' pools are compiled for.
        codecs: The formats of these layers.
        size: Places of the batch, a power of two.
        capacity: Slots that a row has at most, a power of two.
    """

    parts: tuple[Hashable, ...]
    codecs: tuple[str, ...]
    size: int
    capacity: int


class CapturedSteps:
    """Steps of one new token a row, as far as they can be captured. Not safe for use by several threads.

    Args:
        model: A model that has been switched to our attention.
        options: Further arguments of its forward pass.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[str, int]) -> None:
        self._model = model
        self._options = options
        self._tables: WeakKeyDictionary[Pool, _PoolTable] = WeakKeyDictionary()
        # None where a capture failed, which is not tried again soon.
        self._steps: OrderedDict[_Kind, _StaticStep | None] = OrderedDict()

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Append a token to each row and count it there.

        Args:
            rows: The rows, with room for a token each.
            tokens: Token ids for each row.

        Returns:
            ``[rows, vocabulary]`` float32 logits on the CPU; None if the step cannot be captured, and nothing is done.

        Raises:
            EngineError: A row has no room.
        """
        kind = self._kind(rows, tokens)
        step = None if kind is None else self._step(kind, rows[0].pool)
        if step is None:
            return None
        logits = step(rows, tokens, [self._tables[row.pool] for row in rows])
        for row in rows:
            row.advance(1)
        return logits

    def _kind(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> _Kind | None:
        """Return what a step has to be captured for; None if it cannot be.

        It can where there are kernels, one token comes for each row, no pass that failed is repeated, and the kernels
        fit all layers of all rows and are compiled for the same.
        """
        if not kernels.capturable(self._model.device) or any(len(own) != 1 for own in tokens):
            return None
        if not rows or any(row.observed_layers for row in rows):
            return None
        tables = [self._table(row.pool) for row in rows]
        parts, codecs = tables[0].kinds, rows[0].grant.codecs
        if None in parts or any(table.kinds != parts for table in tables):
            return None
        if any(row.grant.codecs != codecs for row in rows):
            return None
        return _Kind(parts, codecs, _power(len(rows)), _power(max(table.capacity for table in tables)))

    def _table(self, pool: Pool) -> "_PoolTable":
        table = self._tables.get(pool)
        if table is None or not table.holds_for(pool):
            table = self._tables[pool] = _PoolTable(pool, self._group)
        return table

    @property
    def _group(self) -> int:
        config = self._model.config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        return heads // int(getattr(config, "num_key_value_heads", None) or heads)

    def _step(self, kind: _Kind, pool: Pool) -> "_StaticStep | None":
        if kind not in self._steps:
            while len(self._steps) >= _MOST_STEPS:
                self._steps.popitem(last=False)
            self._steps[kind] = self._capture(kind, pool)
        self._steps.move_to_end(kind)
        return self._steps[kind]

    def _capture(self, kind: _Kind, pool: Pool) -> "_StaticStep | None":
        try:
            return _StaticStep(self._model, self._options, kind, pool)
        except RuntimeError as error:  # Torch's errors of captures and of memory. No row has been touched.
            _LOG.warning("a decode step of %d rows cannot be captured, and runs without a graph: %s", kind.size, error)
            return None


class _PoolTable:
    """Where the tensors of a pool lie, as long as they lie there.

    Args:
        pool: The pool.
        group: Query heads to a KV head.
    """

    def __init__(self, pool: Pool, group: int) -> None:
        self.kinds = tuple(kernels.kind_of(layer, group) for layer in pool.layers)
        # All layers' tensors are replaced together.
        self._keys = ref(pool.layers[0].keys)
        if None in self.kinds:
            return
        first, second = (np.array([entry(layer, row) for layer in pool.layers], np.int64) for row in (0, 1))
        self._first, self._stride = first, second - first
        self.capacity = int(first[:, CAPACITY].max())

    def holds_for(self, pool: Pool) -> bool:
        """Return whether the pool's tensors are still those."""
        return self._keys() is pool.layers[0].keys

    def of_row(self, row: int) -> np.ndarray:
        """Return a row's ``[layers, fields]`` int64."""
        return self._first + row * self._stride


class _StaticStep:
    """A step of one kind: its buffers, and on a GPU the graph over them.

    Args:
        model: The model.
        options: Further arguments of its forward pass.
        kind: What the step is captured for.
        pool: A pool of that kind; no row of it is touched.

    Raises:
        RuntimeError: The pass cannot be captured, or memory has run out.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[str, int], kind: _Kind, pool: Pool) -> None:
        self._model, self._options, self._size = model, options, kind.size
        parts, size, device = len(kind.parts), kind.size, model.device
        # Tokens, positions, then of each layer slots and tables.
        shape = (2 + parts * (1 + FIELDS), size)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(shape, dtype=torch.int64, device=device)
        words = self._host.numpy()
        self._slots = words[2 : 2 + parts]
        self._tables = words[2 + parts :].reshape(parts, FIELDS, size)
        self._filled: list[tuple[_PoolTable, int]] = []
        slots, tables = self._device[2 : 2 + parts], self._device[2 + parts :].view(parts, FIELDS, size)
        places = [kernels.places(tables[part], slots[part], self._device[1], kind.capacity) for part in range(parts)]
        self._view = _StaticView(pool, places)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._send([], [], [])
        with torch.cuda.device_of(self._device):  # type: ignore[no-untyped-call]
            self._logits = self._pass()  # All places are empty.
            if device.type == "cuda":
                self._graph = self._captured()

    def __call__(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], tables: Sequence[_PoolTable]
    ) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` float32 logits on the CPU; the rows still have to count the tokens."""
        self._send(rows, tokens, tables)
        with torch.cuda.device_of(self._device):  # type: ignore[no-untyped-call]
            if self._graph is None:
                self._logits = self._pass()
            else:
                self._graph.replay()
        return self._logits[: len(rows)].cpu()

    def _send(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], tables: Sequence[_PoolTable]) -> None:
        """Put into the buffers what a step is about. The step before has read them: its logits have come."""
        count = len(rows)
        words = self._host.numpy()
        words[:2] = 0
        self._slots[:] = -1
        if count:
            places = places_of(rows)
            words[0, :count] = [own[0] for own in tokens]
            words[1, :count] = places.steps
            self._slots[:, :count] = places.lengths
        filled = [(table, row.index) for table, row in zip(tables, rows, strict=True)]
        if filled != self._filled or not filled:
            self._tables[:] = np.array(NOWHERE)[:, None]
            for place, (table, index) in enumerate(filled):
                self._tables[:, :, place] = table.of_row(index)
            self._filled = filled
        self._device.copy_(self._host, non_blocking=True)

    def _pass(self) -> torch.Tensor:
        output = self._model(
            input_ids=self._device[0].unsqueeze(1),
            position_ids=self._device[1].unsqueeze(1),
            cache=self._view,
            use_cache=True,
            **self._options,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _captured(self) -> torch.cuda.CUDAGraph:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._pass()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads encode segments meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._pass()
        return graph


class _StaticView(Cache):
    """What a static step's forward pass sees of the cache.

    Args:
        pool: A pool whose layers are like those of the rows, but for where they lie.
        places: Of each layer of the pool, the rows' places.
    """

    def __init__(self, pool: Pool, places: Sequence["kernels.Places"]) -> None:
        super().__init__(layers=[])
        self._pool, self._places = pool, places

    def __len__(self) -> int:
        return self._pool.model_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tag the new keys, so that the attention function finds its way back here."""
        del args, kwargs
        return tag(key_states, self, layer_idx), value_states

    def window(self, layer: int) -> int:
        """Return 0: sliding layers do not fit."""
        del layer
        return 0

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Append and attend in one layer, by head if the pool is held so."""
        del mask
        parts = self._pool.parts(layer)
        outputs = [
            kernels.attend_at(self._pool.layers[part], self._places[part], own)
            for part, own in zip(parts, new.parts(len(parts)), strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> NoReturn:
        """Refuse: a graph would keep the answer. Models that take positions from it are stepped without one."""
        del layer_idx
        raise RuntimeError("the model asks for a length that changes from step to step")

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        """Return 0: the size of a mask that nobody makes."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and offset of a mask that nobody makes."""
        del layer_idx
        return query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        """No layer is."""
        return [False] * len(self)

    @property
    def is_sliding(self) -> list[bool]:
        """No layer is."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is."""
        return [False] * len(self)


def _power(number: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << (number - 1).bit_length()
