"""The staging buffer: segments wait here, within a bound, on their way to the manager."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc

from scissorhands.v1 import cache_manager_pb2, quality_pb2
from scissorhands_server.chunks import MAX_CHUNK_BYTES, chunks
from scissorhands_server.worker.link import ManagerLink

LOGGER = logging.getLogger(__name__)

# Bytes that one call carries; a call is repeated whole if it fails.
BATCH_BYTES = 8 << 20
ATTEMPTS = 3
# How long a manager that refused or broke off is left alone.
RETRY_SECONDS = 0.5
UPLOAD_DEADLINE_SECONDS = 10.0
# Session ends that may wait; one that does not fit is left to its lease.
MAX_ENDS = 4096
# Session ends that are sent at once.
ENDS_AT_ONCE = 64
# How long a wait lasts before the loop looks around again.
IDLE_SECONDS = 1.0

_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    # How grpc reports a connection that broke while a message was being written.
    grpc.StatusCode.INTERNAL,
)


@dataclass(frozen=True, eq=False)
class StagedSegment:
    """A segment that waits."""

    session: cache_manager_pb2.SessionSpec
    epoch: int
    data: bytes


class Uploader:
    """Sends segments and session ends to the manager, a session's end after its last segment.

    ``stage`` and ``end`` may be called from any thread and never wait. What they leave here waits while the manager is
    away: an end that were lost would leave its session open until its lease runs out, and its segments in the store.

    Args:
        link: The link to the manager.
        loop: The event loop on which the link lives.
        bound: Bytes of segments that may wait; what does not fit is refused.
    """

    def __init__(self, link: ManagerLink, loop: asyncio.AbstractEventLoop, bound: int) -> None:
        self._link = link
        self._loop = loop
        self._bound = bound
        self._staged: deque[StagedSegment] = deque()
        self._bytes = 0
        # By session.
        self._ends: dict[str, cache_manager_pb2.CloseSessionRequest] = {}
        self._lock = threading.Lock()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin sending; called on the event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self, grace: float) -> None:
        """Send what waits, for at most ``grace`` seconds, then stop."""
        if self._link.up and self._busy:
            self._drained.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._drained.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def accepting(self) -> bool:
        """Whether there is any room."""
        return self._bytes < self._bound

    def stage(self, session_id: str, epoch: int, segment: bytes) -> bool:
        """Queue a segment; False if it does not fit or its session has ended."""
        session = self._link.session(session_id)
        with self._lock:
            if session is None or self._bytes + len(segment) > self._bound:
                return False
            self._staged.append(StagedSegment(session, epoch, segment))
            self._count(len(segment))
        self._notify()
        return True

    async def sent(self, session_id: str) -> None:
        """Wait until no segment of a session waits, stored or dropped; the caller sets the deadline."""
        while self._waiting(session_id):
            self._moved.clear()
            if self._waiting(session_id):
                await self._moved.wait()

    def _waiting(self, session_id: str) -> bool:
        with self._lock:
            return any(item.session.session_id == session_id for item in self._staged)

    def end(
        self, session_id: str, *, discard: bool, quality: quality_pb2.Quality | None = None, fence: int = 0
    ) -> None:
        """Queue a session's end, with what eviction cost it; with ``discard`` its waiting segments are dropped.

        Args:
            session_id: The session.
            discard: Whether its segments in the store are deleted too.
            quality: What eviction cost it.
            fence: Fencing token of the turn that ends, of a session that has several.
        """
        closing = cache_manager_pb2.CloseSessionRequest(
            session_id=session_id, discard_segments=discard, quality=quality, fence=fence
        )
        with self._lock:
            if discard:
                for item in list(self._staged):
                    if item.session.session_id == session_id:
                        self._staged.remove(item)
                        self._dropped(item)
            if len(self._ends) < MAX_ENDS:
                self._ends[session_id] = closing
        self._notify()

    @property
    def _busy(self) -> bool:
        return bool(self._staged or self._ends)

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        attempts = 0
        while True:
            if not self._busy:
                self._drained.set()
                self._wake.clear()
                if not self._busy:
                    await self._wait(self._wake.wait())
                continue
            if not self._link.up:
                await self._wait(self._link.wait_up())
                continue
            settled = await self._send_ends()
            batch = self._batch()
            if batch:
                attempts += 1
                if await self._upload(batch, last=attempts >= ATTEMPTS):
                    attempts = 0
                else:
                    settled = False
            if not settled:
                await asyncio.sleep(RETRY_SECONDS)

    async def _send_ends(self) -> bool:
        """Close the sessions that have ended and none of whose segments wait; False if one must be repeated."""
        with self._lock:
            waiting = {item.session.session_id for item in self._staged}
            due = [end for session, end in self._ends.items() if session not in waiting][:ENDS_AT_ONCE]
        answered = await asyncio.gather(*(self._link.close(closing) for closing in due))
        with self._lock:
            for closing, done in zip(due, answered, strict=True):
                # Unless its next turn has ended meanwhile.
                if done and self._ends.get(closing.session_id) is closing:
                    del self._ends[closing.session_id]
        return all(answered)

    @staticmethod
    async def _wait(event: Awaitable[object]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await event

    def _batch(self) -> list[StagedSegment]:
        """Return the segments at the head of the queue, up to a bound of bytes; they stay in the queue."""
        batch: list[StagedSegment] = []
        size = 0
        with self._lock:
            for item in self._staged:
                if batch and size + len(item.data) > BATCH_BYTES:
                    break
                batch.append(item)
                size += len(item.data)
        return batch

    async def _upload(self, batch: list[StagedSegment], *, last: bool) -> bool:
        """Send a batch; True if it has left the queue, stored or dropped."""
        try:
            response = await self._link.stub.OffloadSegments(_messages(batch), timeout=UPLOAD_DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            self._link.failed(error)
            if error.code() in _PASSING and not last:
                return False
            LOGGER.warning("%d segments were dropped: %s", len(batch), error.details())
            self._remove(batch, refused={(item.session.session_id, item.epoch) for item in batch})
            return True
        self._remove(batch, refused={(item.session_id, item.epoch) for item in response.refused})
        return True

    def _remove(self, batch: list[StagedSegment], refused: set[tuple[str, int]]) -> None:
        metrics = self._link.metrics
        with self._lock:
            for item in batch:
                if item not in self._staged:  # Its session ended meanwhile, and it was dropped and counted there.
                    continue
                self._staged.remove(item)
                if (item.session.session_id, item.epoch) in refused:
                    self._dropped(item)
                else:
                    self._count(-len(item.data))
                    metrics.segments.labels("offloaded").inc()
                    metrics.segment_bytes.labels("offloaded").inc(len(item.data))
        self._moved.set()

    def _dropped(self, item: StagedSegment) -> None:
        self._count(-len(item.data))
        self._link.metrics.segments.labels("dropped").inc()
        self._link.metrics.segment_bytes.labels("dropped").inc(len(item.data))

    def _count(self, size: int) -> None:
        self._bytes += size
        self._link.metrics.staged.set(self._bytes)


def _messages(batch: list[StagedSegment]) -> Iterator[cache_manager_pb2.OffloadSegmentsRequest]:
    for item in batch:
        yield cache_manager_pb2.OffloadSegmentsRequest(
            header=cache_manager_pb2.SegmentHeader(session=item.session, epoch=item.epoch, size_bytes=len(item.data))
        )
        for chunk in chunks(item.data, MAX_CHUNK_BYTES):
            yield cache_manager_pb2.OffloadSegmentsRequest(chunk=chunk)
