"""Receiving segments: the chunks of each become one string of bytes, within limits."""

from collections.abc import Awaitable, Callable

from scissorhands.errors import InvalidRequestError
from scissorhands.v1 import cache_manager_pb2
from scissorhands_server.chunks import MAX_CHUNK_BYTES
from scissorhands_server.manager.admission import Admission
from scissorhands_server.manager.stream import MessageStream

Requests = MessageStream[cache_manager_pb2.OffloadSegmentsRequest]
# Called before a segment's bytes come; raises if the header is malformed.
OnHeader = Callable[[cache_manager_pb2.SegmentHeader], None]
# Called with a segment and its bytes, None if it was announced as too large and its bytes were not kept.
OnSegment = Callable[[cache_manager_pb2.SegmentHeader, bytes | None], Awaitable[None]]


async def receive_segments(
    requests: Requests, admission: Admission, largest: int, on_header: OnHeader, on_segment: OnSegment
) -> None:
    """Receive all segments of a stream, one at a time, and hand each over when it is whole.

    Args:
        requests: The stream.
        admission: Bounds the bytes of segments on their way in, over all streams.
        largest: Most bytes of one segment.
        on_header: Checks a segment's header.
        on_segment: Takes a whole segment.

    Raises:
        InvalidRequestError: The stream is malformed.
        CapacityError: There is no room for another segment now.
    """
    header = _header(await requests.next())
    while header is not None:
        on_header(header)
        if header.size_bytes > largest:
            # Its chunks are read past, or the segments behind it would be lost with it.
            header = await _skip(requests, header, on_segment)
        else:
            header = await _take(requests, header, admission, on_segment)


async def _take(
    requests: Requests, header: cache_manager_pb2.SegmentHeader, admission: Admission, on_segment: OnSegment
) -> cache_manager_pb2.SegmentHeader | None:
    ticket = admission.admit(header.size_bytes)
    try:
        data = bytearray()
        while len(data) < header.size_bytes:
            message = await requests.next()
            if message is None or message.WhichOneof("part") != "chunk":
                raise InvalidRequestError(
                    "chunk", f"segment {header.epoch} ends after {len(data)} of {header.size_bytes} bytes"
                )
            data += _chunk(message)
            if len(data) > header.size_bytes:
                raise InvalidRequestError("chunk", f"segment {header.epoch} is above its {header.size_bytes} bytes")
        await on_segment(header, bytes(data))
    finally:
        ticket.release()
    return _header(await requests.next())


async def _skip(
    requests: Requests, header: cache_manager_pb2.SegmentHeader, on_segment: OnSegment
) -> cache_manager_pb2.SegmentHeader | None:
    while (message := await requests.next()) is not None and message.WhichOneof("part") == "chunk":
        _chunk(message)
    await on_segment(header, None)
    return _header(message)


def _header(message: cache_manager_pb2.OffloadSegmentsRequest | None) -> cache_manager_pb2.SegmentHeader | None:
    if message is None:
        return None
    if message.WhichOneof("part") != "header":
        raise InvalidRequestError("part", "a segment must begin with its header")
    if message.header.size_bytes == 0:
        raise InvalidRequestError("header.size_bytes", "must be at least 1")
    return message.header


def _chunk(message: cache_manager_pb2.OffloadSegmentsRequest) -> bytes:
    if not 0 < len(message.chunk) <= MAX_CHUNK_BYTES:
        raise InvalidRequestError("chunk", f"must be 1 to {MAX_CHUNK_BYTES} bytes, got {len(message.chunk)}")
    return message.chunk
