"""Chunks of rows as messages, without the copies that protobuf's objects make of them.

Those copy a field of bytes whenever it is set, written, parsed and read, which takes more time than all else that
happens to a row's bytes on their way. So a message that holds nothing but a chunk is written and read here, as protobuf
would (https://protobuf.dev/programming-guides/encoding): tag, length, bytes. All others are protobuf's.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import grpc
from google.protobuf.message import Message

from scissorhands.v1 import cache_manager_pb2, prefix_pb2, suspension_pb2
from scissorhands_server.chunks import chunks

_SERVICE = cache_manager_pb2.DESCRIPTOR.services_by_name["CacheManagerService"]
_LENGTH_DELIMITED = 2
# A varint has seven bits of a number in each byte, the lowest first, and the eighth says that more follow.
_MORE = 0x80
_MOST_LENGTH_BYTES = 5

AnyMessage = TypeVar("AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Stands for a message of a row's stream that holds a chunk."""

    chunk: bytes | memoryview

    def WhichOneof(self, group: str) -> str:  # noqa: N802 - Named by protobuf.
        """Return which part of the message is there."""
        del group
        return "chunk"


def row_chunks(data: bytes | memoryview) -> Iterator[RowChunk]:
    """Yield a part of a row as messages, each a view of a piece of it."""
    return (RowChunk(chunk) for chunk in chunks(memoryview(data)))


class RowCodec(Generic[AnyMessage]):
    """Writes and reads one kind of message with a field ``chunk`` of bytes.

    Args:
        kind: Its class.
    """

    def __init__(self, kind: type[AnyMessage]) -> None:
        self._kind = kind
        number = kind.DESCRIPTOR.fields_by_name["chunk"].number
        self._tag = number << 3 | _LENGTH_DELIMITED
        assert self._tag < _MORE  # One byte.

    def write(self, message: AnyMessage | RowChunk) -> bytes:
        """Write a message."""
        if not isinstance(message, RowChunk):
            return message.SerializeToString()
        start, left = bytearray([self._tag]), len(message.chunk)
        while left >= _MORE:
            start.append(left % _MORE | _MORE)
            left //= _MORE
        start.append(left)
        return b"".join((start, message.chunk))

    def read(self, data: bytes) -> AnyMessage | RowChunk:
        """Read a message; a chunk is a view of its bytes.

        Raises:
            DecodeError: It is none.
        """
        if data and data[0] == self._tag:
            length = 0
            for index, byte in enumerate(data[1 : 1 + _MOST_LENGTH_BYTES]):
                length += byte % _MORE << 7 * index
                if byte < _MORE:
                    chunk = memoryview(data)[2 + index :]
                    if len(chunk) == length:
                        return RowChunk(chunk)
                    break
        return self._kind.FromString(data)


_SUSPENDED = RowCodec(suspension_pb2.SuspendSessionRequest)
_RESUMED = RowCodec(suspension_pb2.ResumeSessionResponse)
_STORED = RowCodec(prefix_pb2.StorePrefixRequest)
_LOADED = RowCodec(prefix_pb2.LoadPrefixResponse)


def _path(name: str) -> str:
    return f"/{_SERVICE.full_name}/{_SERVICE.methods_by_name[name].name}"


class RowCalls:
    """The calls of a cache manager that carry rows, for its clients.

    Args:
        channel: To the manager.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.suspend: grpc.aio.StreamUnaryMultiCallable[Any, suspension_pb2.SuspendSessionResponse] = (
            channel.stream_unary(
                _path("SuspendSession"),
                request_serializer=_SUSPENDED.write,
                response_deserializer=suspension_pb2.SuspendSessionResponse.FromString,
            )
        )
        self.resume: grpc.aio.UnaryStreamMultiCallable[suspension_pb2.ResumeSessionRequest, Any] = channel.unary_stream(
            _path("ResumeSession"),
            request_serializer=suspension_pb2.ResumeSessionRequest.SerializeToString,
            response_deserializer=_RESUMED.read,
        )
        self.store: grpc.aio.StreamUnaryMultiCallable[Any, prefix_pb2.StorePrefixResponse] = channel.stream_unary(
            _path("StorePrefix"),
            request_serializer=_STORED.write,
            response_deserializer=prefix_pb2.StorePrefixResponse.FromString,
        )
        self.load: grpc.aio.UnaryStreamMultiCallable[prefix_pb2.LoadPrefixRequest, Any] = channel.unary_stream(
            _path("LoadPrefix"),
            request_serializer=prefix_pb2.LoadPrefixRequest.SerializeToString,
            response_deserializer=_LOADED.read,
        )


class RowMessages(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # Generic in its stubs only.
    """Lets a cache manager's servicer take and give :class:`RowChunk` in the calls that carry rows."""

    _taken: ClassVar[dict[str, RowCodec[Any]]] = {_path("SuspendSession"): _SUSPENDED, _path("StorePrefix"): _STORED}
    _given: ClassVar[dict[str, RowCodec[Any]]] = {_path("ResumeSession"): _RESUMED, _path("LoadPrefix"): _LOADED}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Put what writes and reads chunks in the place of protobuf's."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if taken := self._taken.get(method):
            return grpc.stream_unary_rpc_method_handler(handler.stream_unary, taken.read, handler.response_serializer)
        if given := self._given.get(method):
            return grpc.unary_stream_rpc_method_handler(handler.unary_stream, handler.request_deserializer, given.write)
        return cast("grpc.RpcMethodHandler[Any, Any]", handler)
