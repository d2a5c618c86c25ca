"""Offloading: evicted slots become segments on their way to the manager."""

import logging
from typing import Protocol

from scissorhands.archive import encode_segment
from scissorhands.codec import Codec, get_codec
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import EXACT
from scissorhands.grant import codecs_text, grant_text, slots_text
from scissorhands.row import Eviction
from scissorhands.segment import SegmentIdentity
from scissorhands.swap import Swap
from scissorhands.tenant import split
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.resident import resident_version
from scissorhands_server.worker.task import Task

LOGGER = logging.getLogger(__name__)


class SegmentSink(Protocol):
    """Where segments go."""

    @property
    def accepting(self) -> bool:
        """Whether a segment has any chance now; encoding one that has none would be wasted."""

    def stage(self, session_id: str, epoch: int, segment: bytes) -> bool:
        """Queue a segment without waiting; False if there is no room."""


class Offloader:
    """Encodes what evictions drop and hands it to the link, or drops and counts it.

    Args:
        loaded: The served model.
        sink: Where segments go.
        metrics: The worker's metrics.
    """

    def __init__(self, loaded: LoadedModel, sink: SegmentSink, metrics: WorkerMetrics) -> None:
        self._info = loaded.info
        self._statistics = loaded.statistics
        self._sink = sink
        self._metrics = metrics

    def offload(self, task: Task, eviction: Eviction | Swap) -> None:
        """Encode and queue the slots of one eviction or swap; called from the engine's thread, never waits."""
        if not task.codec:
            return
        segment = self._encode(task, eviction) if self._sink.accepting else b""
        if segment and self._sink.stage(task.session_id, eviction.epoch, segment):
            task.statistics.segments += 1
            task.statistics.segment_bytes += len(segment)
        else:
            if task.recall:
                task.recall.unsent.add(eviction.epoch)
            task.statistics.segments_dropped += 1
            self._metrics.segments.labels("dropped").inc()
            self._metrics.segment_bytes.labels("dropped").inc(len(segment))

    def identity(self, task: Task, tokens: str) -> SegmentIdentity:
        """Return the identity of a task's segments.

        Args:
            task: The task.
            tokens: Hex digest of all token ids up to the segment's step.

        Raises:
            InvalidRequestError: This worker lacks the codec.
        """
        packed = bool(task.grant.codecs)
        codec = self._codec(task)
        tenant, session_id = split(task.session_id)
        return SegmentIdentity(
            model=self._info.fingerprint,
            tokenizer=self._info.tokenizer_fingerprint,
            dtype=self._info.dtype,
            policy=grant_text(task.grant),
            layer_slots=slots_text(task.grant),
            codec=codecs_text(task.grant) if packed else codec.name,
            codec_version=resident_version(task.grant, self._statistics) if packed else codec.version,
            tokens=tokens,
            tenant=tenant,
            session_id=session_id,
        )

    def _codec(self, task: Task) -> Codec:
        # What is resident packed is stored as it is, whatever evicted slots are archived in.
        return get_codec(EXACT if task.grant.codecs else task.codec, self._info.head_dim)

    def _encode(self, task: Task, eviction: Eviction | Swap) -> bytes:
        try:
            identity = self.identity(task, task.token_digest(eviction.step))
            # Only who recalls looks at summaries.
            keys = eviction.exact_keys() if task.recall else None
            return encode_segment(
                identity,
                eviction.epoch,
                eviction.step,
                eviction.layers,
                self._codec(task),
                self._info.head_dim,
                self._info.kv_heads,
                keys,
            )
        except InvalidRequestError as error:
            # The manager may grant a codec that this worker lacks, and numbers that are not finite cannot be stored;
            # the answer goes on without its archive.
            LOGGER.warning("a segment could not be encoded: %s", error)
            return b""
