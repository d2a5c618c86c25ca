"""Recall as a worker and a manager do it, in one process and without services: the same segments, choice and swap."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scissorhands.archive import decode_slots, encode_segment, packed_slots
from scissorhands.cache import ResidentCache
from scissorhands.codec import Codec, get_codec
from scissorhands.formats import EXACT
from scissorhands.recall import LAST, Found, choose
from scissorhands.row import Eviction, Row
from scissorhands.segment import SegmentHeader, SegmentIdentity, check_segment
from scissorhands.slots import LooseSlots
from scissorhands.step import ModelStep
from scissorhands.summary import read_summary
from scissorhands.swap import Swap, sketch_of, swap

# What evicted slots are archived in, unless they are resident packed: what a worker does by default.
ARCHIVE_CODEC = "int4"


@dataclass(frozen=True)
class Recall:
    """How a row recalls.

    Args:
        share: Share of each head's budget that may be recalled at once.
        last: Tokens of the prompt that are read after the recall, and whose queries ask for it.
        every: Decoded tokens from one recall to the next; 0 recalls at the prompt's end only.
    """

    share: float
    last: int = LAST
    every: int = 0

    def __str__(self) -> str:
        return f"recall {self.share:g}{f' every {self.every}' if self.every else ''}"

    def key(self) -> dict[str, float]:
        """Return the fields that name it."""
        return asdict(self)


class Recaller:
    """The archive of one row, and what comes back from it.

    Args:
        step: Runs forward passes.
        cache: The row's cache.
        row: The row.
        recall: How it recalls.
    """

    def __init__(self, step: ModelStep, cache: ResidentCache, row: Row, recall: Recall) -> None:
        self._step = step
        self._cache = cache
        self._row = row
        self._recall = recall
        self._segments: dict[int, tuple[SegmentHeader, bytes]] = {}
        self.recalled = 0

    @property
    def archived_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(len(data) for _, data in self._segments.values())

    @property
    def summary_bytes(self) -> int:
        """Bytes of their summaries."""
        return sum(header.summary.size for header, _ in self._segments.values())

    def keep(self, gone: Eviction | Swap | None) -> None:
        """Archive what has left the row."""
        if gone is None:
            return
        shape = self._cache.shape
        identity = SegmentIdentity(*[""] * 10)
        data = encode_segment(
            identity, gone.epoch, gone.step, gone.layers, self._codec, shape.head_dim, shape.kv_heads, gone.exact_keys()
        )
        self._segments[gone.epoch] = check_segment(data), data

    def recall(self, tokens: Sequence[int], rounds: int = 1) -> None:
        """Let the next tokens, for which there is room in the row, ask for evicted slots, and swap those in.

        Args:
            tokens: The next tokens.
            rounds: Recalls, one after another.
        """
        for _ in range(rounds if self._segments else 0):
            self._once(tokens)

    def _once(self, tokens: Sequence[int]) -> None:
        queries = self._step.peek(self._row, tokens)
        sketch = sketch_of(self._row, queries, self._recall.share)
        archive = {
            epoch: read_summary(
                data[header.summary.offset :][: header.summary.size],
                [section.slots for section in header.sections],
                header.head_dim,
            )
            for epoch, (header, data) in self._segments.items()
        }
        parts: dict[int, list[LooseSlots]] = {}
        for found in choose(sketch, archive):
            parts.setdefault(found.head, []).append(self._read(found))
        swapped = swap(self._cache, self._row, sketch, {head: LooseSlots.join(own) for head, own in parts.items()})
        self.recalled += swapped.slots
        self.keep(swapped)

    @property
    def _codec(self) -> Codec:
        return get_codec(EXACT if self._row.grant.codecs else ARCHIVE_CODEC, self._cache.shape.head_dim)

    def _read(self, found: Found) -> LooseSlots:
        header, data = self._segments[found.epoch]
        section = header.sections[found.head]
        own = data[section.offset :][: section.size]
        if self._row.grant.codecs:
            pool = self._row.pool.layers[found.head // self._row.pool.kv_heads]
            return packed_slots(own, section.slots, found.slots, (pool.keys.shape[-1], pool.values.shape[-1]))
        return decode_slots(own, section.slots, found.slots, self._codec, header.head_dim, self._cache.dtype)
