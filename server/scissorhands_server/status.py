"""From exceptions to gRPC status: one table, applied at the boundary by one interceptor."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from scissorhands.errors import (
    BrokenRowError,
    BudgetTooSmallError,
    CapacityError,
    ConfigurationError,
    CorruptRowError,
    CorruptSegmentError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    ManagerUnavailableError,
    MismatchError,
    MissingPartError,
    NotFoundError,
    QuotaError,
    ScissorhandsError,
    SessionConflictError,
    StoppingError,
    StoreFullError,
    StoreUnavailableError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedModelError,
)

LOGGER = logging.getLogger(__name__)

ERROR_DOMAIN = "scissorhands"
# A status travels in trailers, of which clients take 8 KiB by default. Messages quote what a caller sent, which may be
# anything, and a byte of it takes up to five in all, so they are cut.
MAX_MESSAGE_BYTES = 800
MAX_FIELD_BYTES = 200

# Called once a call with the method's full name and the name of its status code.
Observer = Callable[[str, str], None]


@dataclass(frozen=True)
class StatusRow:
    """What one class of exceptions becomes: a code and the reason of its ErrorInfo."""

    code: grpc.StatusCode
    reason: str


# The most exact class of an exception decides: the first of its ancestors that has a row.
STATUS_TABLE: dict[type[ScissorhandsError], StatusRow] = {
    InvalidRequestError: StatusRow(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    BudgetTooSmallError: StatusRow(grpc.StatusCode.INVALID_ARGUMENT, "BUDGET_TOO_SMALL"),
    UnauthenticatedError: StatusRow(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    ForbiddenError: StatusRow(grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN"),
    NotFoundError: StatusRow(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    ConfigurationError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION"),
    UnsupportedModelError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED_MODEL"),
    CapacityError: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "CAPACITY"),
    QuotaError: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA"),
    UnavailableError: StatusRow(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    StoreUnavailableError: StatusRow(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    StoreFullError: StatusRow(grpc.StatusCode.UNAVAILABLE, "STORE_FULL"),
    ManagerUnavailableError: StatusRow(grpc.StatusCode.UNAVAILABLE, "MANAGER_UNAVAILABLE"),
    StoppingError: StatusRow(grpc.StatusCode.UNAVAILABLE, "STOPPING"),
    CorruptSegmentError: StatusRow(grpc.StatusCode.DATA_LOSS, "CORRUPT_SEGMENT"),
    BrokenRowError: StatusRow(grpc.StatusCode.DATA_LOSS, "BROKEN_ROW"),
    CorruptRowError: StatusRow(grpc.StatusCode.DATA_LOSS, "CORRUPT_ROW"),
    MissingPartError: StatusRow(grpc.StatusCode.NOT_FOUND, "MISSING_PART"),
    MismatchError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, "MISMATCH"),
    SessionConflictError: StatusRow(grpc.StatusCode.ABORTED, "SESSION_CONFLICT"),
    EngineError: StatusRow(grpc.StatusCode.INTERNAL, "ENGINE"),
    ScissorhandsError: StatusRow(grpc.StatusCode.INTERNAL, "INTERNAL"),
}


def status_row(error: ScissorhandsError) -> StatusRow:
    """Return the row of an exception."""
    return next(STATUS_TABLE[kind] for kind in type(error).__mro__ if kind in STATUS_TABLE)


def status_message(error: ScissorhandsError) -> status_pb2.Status:
    """Return the status of an exception with its ``google.rpc`` details."""
    row = status_row(error)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN, metadata=_metadata(error))
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_FIELD_BYTES), description=_cut(error.description), reason=row.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityError | SessionConflictError) and error.retry_after:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    # grpc's codes are pairs of the number and a lower-case name.
    number = row.code.value[0]
    return status_pb2.Status(code=number, message=_cut(str(error)), details=[_packed(detail) for detail in details])


def internal_status() -> status_pb2.Status:
    """Return the status of a failure that nobody foresaw. It tells nothing of it: the log does."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=ERROR_DOMAIN)
    return status_pb2.Status(code=code_pb2.INTERNAL, message="internal error; see the log", details=[_packed(info)])


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # Generic in its stubs only.
    """Turns what a servicer of ours raises into a status, for every kind of call.

    A servicer's own ``abort`` and cancellation pass through.

    Args:
        services: Full names of the services that it guards; others (health, reflection) are left alone.
        observe: Told the outcome of every guarded call.
    """

    def __init__(self, services: tuple[str, ...], observe: Observer | None = None) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._observe = observe

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap the handler of a guarded method."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(self._prefixes):
            return handler
        return self._wrapped(handler, method)

    def _wrapped(self, handler: Any, method: str) -> "grpc.RpcMethodHandler[Any, Any]":
        codecs = {
            "request_deserializer": _tolerant(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method, _decoded), **codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, method, _Decoded), **codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream, method, _decoded), **codecs)
        return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, method, _Decoded), **codecs)

    def _unary(self, inner: Any, method: str, decoded: Callable[[Any], Any]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            async with _Boundary(context, method, self._observe):
                return await inner(decoded(request), context)

        return call

    def _stream(self, inner: Any, method: str, decoded: Callable[[Any], Any]) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            async with _Boundary(context, method, self._observe):
                responses = inner(decoded(request), context)
                try:
                    async for response in responses:
                        yield response
                finally:
                    await responses.aclose()

        return call


class _Boundary:
    """Ends a call with the status of whatever leaves its block."""

    def __init__(self, context: Any, method: str, observe: Observer | None) -> None:
        self._context = context
        self._method = method
        self._observe = observe

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._told("OK")
        elif isinstance(error, ScissorhandsError):
            await self._abort(status_message(error))
        elif isinstance(error, grpc.aio.AbortError):
            code = self._context.code()
            self._told(code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN")
        elif isinstance(error, Exception):
            # The boundary of the process: a failure that nobody foresaw must end this call and no other.
            LOGGER.error("unexpected failure in %s", self._method, exc_info=error)
            await self._abort(internal_status())
        else:
            self._told("CANCELLED")  # asyncio.CancelledError or GeneratorExit: the client went away.

    async def _abort(self, message: status_pb2.Status) -> None:
        status = rpc_status.to_status(message)
        self._told(status.code.name)
        await self._context.abort(status.code, status.details, status.trailing_metadata)

    def _told(self, code: str) -> None:
        if self._observe is not None:
            self._observe(self._method, code)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that hands its error on; grpc would answer UNKNOWN before ours see the call."""

    def tolerant(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return tolerant


def _decoded(request: Any) -> Any:
    if isinstance(request, DecodeError):
        raise InvalidRequestError("request", f"the bytes are no such message: {request}") from request
    return request


class _Decoded:
    """The requests of a stream, which ends at the first that could not be read."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _decoded(await anext(self._requests))


def _metadata(error: ScissorhandsError) -> dict[str, str]:
    if isinstance(error, BudgetTooSmallError):
        return {"field": _cut(error.field, MAX_FIELD_BYTES), "smallest_slots": str(error.smallest)}
    if isinstance(error, InvalidRequestError | NotFoundError):
        return {"field": _cut(error.field, MAX_FIELD_BYTES)}
    if isinstance(error, QuotaError):
        return {"setting": error.setting}
    if isinstance(error, StoppingError):
        return {"session_id": error.kept}
    if isinstance(error, MismatchError):
        return {"different": _cut(",".join(error.different), MAX_FIELD_BYTES)}
    return {}


def _cut(text: str, most: int = MAX_MESSAGE_BYTES) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= most:
        return encoded.decode()
    return encoded[: most - len("…".encode())].decode(errors="ignore") + "…"


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
