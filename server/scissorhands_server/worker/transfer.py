"""Rows on their way between worker and manager: parts in chunks, and why a call failed."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scissorhands.errors import CorruptRowError, InvalidRequestError, MismatchError
from scissorhands.suspended import Part
from scissorhands.v1 import prefix_pb2, suspension_pb2
from scissorhands_server.row_messages import RowChunk
from scissorhands_server.worker.link import ManagerLink

LOGGER = logging.getLogger(__name__)

_REASONS = {
    grpc.StatusCode.NOT_FOUND: "new",
    grpc.StatusCode.ABORTED: "conflict",
    grpc.StatusCode.FAILED_PRECONDITION: "mismatch",
    grpc.StatusCode.DATA_LOSS: "corrupt",
    grpc.StatusCode.DEADLINE_EXCEEDED: "late",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "no_room",
    grpc.StatusCode.UNAVAILABLE: "manager_unavailable",
}
# What a manager says of its store, which is no failure of its own.
_TOLD = {
    "STORE_UNAVAILABLE": "store_unavailable",
    "STORE_FULL": "store_full",
    "QUOTA": "quota",
    "MISSING_PART": "missing",
}

Response = TypeVar("Response", suspension_pb2.ResumeSessionResponse, prefix_pb2.LoadPrefixResponse)


class Miss(Exception):  # noqa: N818 - no error: the prompt is read instead.
    """There is nothing to go on from, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def next_message(call: "grpc.aio.UnaryStreamCall[Any, Response | RowChunk]") -> Response | RowChunk:
    """Return the next message of a stream.

    Raises:
        CorruptRowError: There is none.
    """
    message = await call.read()
    if isinstance(message, Message | RowChunk):
        return cast("Response | RowChunk", message)
    raise CorruptRowError("the stream of a row ends early")


async def next_header(call: "grpc.aio.UnaryStreamCall[Any, Response | RowChunk]") -> Any:
    """Return the header that a stream begins with.

    Raises:
        CorruptRowError: It begins with something else.
    """
    message = await next_message(call)
    if isinstance(message, RowChunk):
        raise CorruptRowError("the stream of a row begins without a header")
    return message.header


async def receive(call: "grpc.aio.UnaryStreamCall[Any, Response | RowChunk]", part: Part, data: memoryview) -> None:
    """Receive a part, and check it.

    Args:
        call: The stream.
        part: The part.
        data: Where it goes; exactly as large as it is.

    Raises:
        CorruptRowError: It is not whole.
    """
    at = 0
    while at < part.size:
        chunk = (await next_message(call)).chunk
        if not 0 < len(chunk) <= part.size - at:
            raise CorruptRowError(f"a chunk of {len(chunk)} bytes does not fit its part")
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    part.check(data)


@contextmanager
def misses(link: ManagerLink, missed: Callable[[str], None], what: str) -> Iterator[None]:
    """Make whatever fails a miss, whose reason ``missed`` is told.

    Args:
        link: The link that is used.
        missed: Counts the reason.
        what: What is loaded, for the log.
    """
    try:
        yield
    except Miss as miss:
        missed(miss.reason)
    except MismatchError:
        missed("mismatch")
    except (CorruptRowError, InvalidRequestError, DecodeError):
        LOGGER.exception("what is stored of %s cannot be used", what)
        missed("corrupt")
    except grpc.aio.AioRpcError as error:
        missed(failure_reason(link, error))


def failure_reason(link: ManagerLink, error: grpc.aio.AioRpcError) -> str:
    """Return why a call failed; a manager that does not answer is left alone for a while."""
    reason = _TOLD.get(_told_reason(error)) or _REASONS.get(error.code(), "failed")
    if reason == "manager_unavailable":
        link.failed(error)
    return reason


def retry_delay(error: grpc.aio.AioRpcError) -> float:
    """Return after what time a server of ours says to try again, in seconds; 0 if it does not say."""
    retry = error_details_pb2.RetryInfo()
    return float(retry.retry_delay.ToTimedelta().total_seconds()) if _attached(error, retry) else 0.0


def _told_reason(error: grpc.aio.AioRpcError) -> str:
    """Return the reason that a server of ours attached to a status; empty if there is none."""
    info = error_details_pb2.ErrorInfo()
    return info.reason if _attached(error, info) else ""


def _attached(error: grpc.aio.AioRpcError, detail: Message) -> bool:
    """Whether a detail of a kind is attached to a status; then read it."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type] # It has what grpcio's own errors have.
        return status is not None and any(each.Unpack(detail) for each in status.details)
    except (ValueError, DecodeError):
        return False
