"""Parts of rows on their way through the manager: read from the store in order, received and sent in chunks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from prometheus_client import Counter

from scissorhands.errors import (
    CorruptRowError,
    InvalidRequestError,
    MismatchError,
    MissingPartError,
    NotFoundError,
    QuotaError,
    SessionConflictError,
    StoreFullError,
    StoreUnavailableError,
)
from scissorhands.suspended import PART_BYTES, Part
from scissorhands.v1 import prefix_pb2, suspension_pb2
from scissorhands_server.chunks import MAX_CHUNK_BYTES
from scissorhands_server.manager.stream import MessageStream
from scissorhands_server.row_messages import RowChunk

# The most that a stream holds: the part in hand, and the one that is fetched or written meanwhile.
STREAM_BYTES = 2 * PART_BYTES

# What else than success becomes of a call. Names of :data:`~scissorhands_server.manager.metrics.SUSPENSION_RESULTS`.
_FAILURES: dict[type[BaseException], str] = {
    InvalidRequestError: "refused",
    NotFoundError: "new",
    SessionConflictError: "conflict",
    MismatchError: "mismatch",
    CorruptRowError: "corrupt",
    MissingPartError: "missing",
    QuotaError: "quota",
    StoreFullError: "store_full",
    StoreUnavailableError: "store_unavailable",
    asyncio.CancelledError: "cancelled",
    GeneratorExit: "cancelled",
}


Message = TypeVar("Message", suspension_pb2.SuspendSessionRequest, prefix_pb2.StorePrefixRequest)


async def in_order(fetches: Sequence[Callable[[], Awaitable[bytes]]]) -> AsyncGenerator[bytes]:
    """Yield what each of ``fetches`` returns; the next is under way while one is looked at."""
    following: asyncio.Future[bytes] | None = None
    try:
        for index, fetch in enumerate(fetches):
            data = await (following or fetch())
            more = index + 1 < len(fetches)
            following = asyncio.ensure_future(fetches[index + 1]()) if more else None
            yield data
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def receive(requests: MessageStream[Message | RowChunk], part: Part) -> bytes:
    """Receive and check one part.

    Raises:
        InvalidRequestError: The stream is malformed.
        CorruptRowError: It is not the part that it should be.
    """
    pieces: list[bytes | memoryview] = []
    missing = part.size
    while missing:
        message = await requests.next()
        if message is None or message.WhichOneof("part") != "chunk":
            raise InvalidRequestError("chunk", f"a part ends after {part.size - missing} of {part.size} bytes")
        chunk = message.chunk
        if not 0 < len(chunk) <= min(MAX_CHUNK_BYTES, missing):
            raise InvalidRequestError("chunk", f"must be 1 to {MAX_CHUNK_BYTES} bytes, all of one part")
        pieces.append(chunk)
        missing -= len(chunk)
    whole = b"".join(pieces)
    part.check(whole)
    return whole


async def receive_all(
    requests: MessageStream[Message | RowChunk], parts: Sequence[Part], write: Callable[[int, bytes], Awaitable[None]]
) -> None:
    """Receive all parts and nothing more; one is written while the next comes in.

    Args:
        requests: The stream, behind its header.
        parts: What must come.
        write: Writes a part, given its index.

    Raises:
        InvalidRequestError: The stream is malformed.
        CorruptRowError: A part is not what it should be.
    """
    writing: asyncio.Task[None] | None = None
    try:
        for index, part in enumerate(parts):
            data = await receive(requests, part)
            # A write that fails is noticed here: a stream that is cancelled while it is waited for cannot be read on.
            if writing is not None:
                await writing
            writing = asyncio.create_task(_written(write(index, data)))
        if await requests.next() is not None:
            raise InvalidRequestError("chunk", "more comes than the manifest says")
        if writing is not None:
            await writing
    finally:
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


@contextmanager
def counted(counter: Counter) -> Iterator[None]:
    """Count what becomes of a call."""
    result = "failed"
    try:
        yield
        result = "done"
    except tuple(_FAILURES) as error:
        result = _FAILURES[type(error)]
        raise
    finally:
        counter.labels(result).inc()


async def _written(writing: Awaitable[None]) -> None:
    await writing
