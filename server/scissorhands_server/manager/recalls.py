"""Recall: what a row asks for is looked for in its session's segments, and the sections to choose from go out.

Only summaries are read to search; of the segments no more than the sections that hold candidates, every one checked. A
segment that cannot be searched is a miss with its reason, and the others are searched all the same.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby

from scissorhands.errors import CorruptSegmentError, InvalidRequestError, NotFoundError
from scissorhands.recall import Found, HeadSketch, choose
from scissorhands.recall_wire import read_layer, slots_bytes
from scissorhands.segment import SegmentHeader
from scissorhands.summary import SectionSummary, read_summary
from scissorhands.v1 import recall_pb2
from scissorhands_server.chunks import MAX_CHUNK_BYTES, chunks
from scissorhands_server.manager.admission import Admission
from scissorhands_server.manager.checks import check_session_id
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.stored import StoredSegments, part_of
from scissorhands_server.manager.stream import MessageStream

LOGGER = logging.getLogger(__name__)

_MOST = 64
_RETRY_SECONDS = 0.5
# Summaries that are read at once.
_LOOKUPS = 8
# Most bytes of a sketch: queries and positions of all heads.
_MAX_SKETCH_BYTES = 16 << 20
# Segments of a session that may be searched.
_MAX_SEGMENTS = 1 << 16

Response = recall_pb2.RecallSectionsResponse
Requests = MessageStream[recall_pb2.RecallSectionsRequest]


class Recalls:
    """Searches segments.

    Args:
        stored: The segments in the store.
        settings: Limits.
        metrics: The manager's metrics.
    """

    def __init__(self, stored: StoredSegments, settings: ManagerSettings, metrics: ManagerMetrics) -> None:
        self._stored = stored
        self._settings = settings
        self._metrics = metrics
        self._admission = Admission("recalls", _MOST, settings.segment_memory_bytes, _RETRY_SECONDS)

    async def recall(self, messages: AsyncIterator[recall_pb2.RecallSectionsRequest]) -> AsyncIterator[Response]:
        """Yield the outcome, then the sections that hold candidates.

        Raises:
            InvalidRequestError: The sketch is malformed.
            CapacityError: Too many rows recall.
            StoreUnavailableError: The store does not answer.
        """
        requests: Requests = MessageStream(messages, self._settings.stream_timeout)
        async with requests.heard_out():
            header = await self._header(requests)
            sketch = await _sketch(requests, header)
        sizes = await self._stored.sizes(header.session_id)
        epochs = [epoch for epoch in sizes if epoch < header.epoch]
        # A summary takes less than half of its segment.
        ticket = self._admission.admit(sum(sizes[epoch] for epoch in epochs) // 2)
        try:
            misses = Counter({"absent": header.epoch - len(epochs)})
            archive, segments = await self._search(header, epochs, misses)
            yield self._outcome(len(archive), misses)
            # Scores of long sequences would hold up every other call.
            found = await asyncio.to_thread(choose, sketch, archive)
            self._metrics.recalls.inc()
            for epoch, parts in groupby(found, key=lambda part: part.epoch):
                try:
                    async with aclosing(self._segment(header.session_id, *segments[epoch], list(parts))) as sections:
                        async for response in sections:
                            yield response
                except (CorruptSegmentError, NotFoundError) as error:
                    yield self._outcome(0, Counter({_miss(error, header.session_id, epoch): 1}))
        finally:
            ticket.release()

    def _outcome(self, segments: int, misses: Counter[str]) -> Response:
        """Count misses, and tell of them."""
        counted = sorted((+misses).items())
        for reason, count in counted:
            self._metrics.recall_misses.labels(reason).inc(count)
        told = [recall_pb2.RecallMiss(reason=reason, count=count) for reason, count in counted]
        return Response(outcome=recall_pb2.RecallOutcome(segments=segments, misses=told))

    async def _header(self, requests: Requests) -> recall_pb2.RecallHeader:
        message = await requests.next()
        if message is None or message.WhichOneof("part") != "header":
            raise InvalidRequestError("part", "the first message must be a header")
        header, limits = message.header, self._settings
        check_session_id(header.session_id, "header.session_id")
        for name, most in (
            ("layers", limits.max_layers),
            ("kv_heads", limits.max_kv_heads),
            ("head_dim", limits.max_head_dim),
            ("epoch", _MAX_SEGMENTS),
        ):
            value = getattr(header, name)
            if not 1 <= value <= most:
                raise InvalidRequestError(f"header.{name}", f"must be 1 to {most}, got {value}")
        return header

    async def _search(
        self, asked: recall_pb2.RecallHeader, epochs: Sequence[int], misses: Counter[str]
    ) -> tuple[dict[int, list[SectionSummary]], Mapping[int, tuple[SegmentHeader, bytes]]]:
        """Read the summaries of segments, and count those that cannot be searched."""
        archive: dict[int, list[SectionSummary]] = {}
        segments: dict[int, tuple[SegmentHeader, bytes]] = {}
        turns = asyncio.Semaphore(_LOOKUPS)
        shape = (asked.layers, asked.kv_heads, asked.head_dim)

        async def read(epoch: int) -> None:
            try:
                async with turns:
                    header, raw, data = await self._stored.summary(asked.session_id, epoch)
                slots = [section.slots for section in header.sections]
                if (header.layers, header.kv_heads, header.head_dim) != shape:
                    misses["mismatch"] += 1
                elif not data:
                    misses["no_summary"] += 1
                else:
                    archive[epoch], segments[epoch] = read_summary(data, slots, header.head_dim), (header, raw)
            except (CorruptSegmentError, NotFoundError) as error:
                misses[_miss(error, asked.session_id, epoch)] += 1

        try:
            async with asyncio.TaskGroup() as group:
                for epoch in epochs:
                    group.create_task(read(epoch))
        except ExceptionGroup as group_error:
            # Whatever fails first ends the others.
            raise group_error.exceptions[0] from None
        return dict(sorted(archive.items())), segments

    async def _segment(
        self, session_id: str, header: SegmentHeader, raw: bytes, found: list[Found]
    ) -> AsyncGenerator[Response]:
        """Yield the sections of one segment that hold candidates."""
        yield Response(segment=raw)
        parts = iter(found)
        wanted = [header.sections[part.head] for part in found]
        async with aclosing(self._stored.runs(session_id, header.epoch, wanted)) as runs:
            async for run, data in runs:
                for section in run:
                    part = next(parts)
                    yield Response(section=recall_pb2.RecalledSection(place=part.head, slots=slots_bytes(part.slots)))
                    own = part_of(run, data, section)
                    for chunk in chunks(own, MAX_CHUNK_BYTES):
                        yield Response(chunk=chunk)
                    self._metrics.recall_sections.inc()
                    self._metrics.recall_bytes.inc(len(own))


async def _sketch(requests: Requests, header: recall_pb2.RecallHeader) -> list[HeadSketch]:
    """Receive all layers of a sketch."""
    sketch: list[HeadSketch] = []
    size = 0
    for layer in range(header.layers):
        message = await requests.next()
        if message is None or message.WhichOneof("part") != "layer":
            raise InvalidRequestError("part", f"the sketch ends after {layer} of {header.layers} layers")
        size += message.ByteSize()
        if size > _MAX_SKETCH_BYTES:
            raise InvalidRequestError("layer", f"the sketch must be at most {_MAX_SKETCH_BYTES} bytes")
        sketch += read_layer(message.layer, header)
    return sketch


def _miss(error: CorruptSegmentError | NotFoundError, session_id: str, epoch: int) -> str:
    LOGGER.info("segment %d of session %s is not recalled: %s", epoch, session_id, error)
    return "corrupt" if isinstance(error, CorruptSegmentError) else "absent"
