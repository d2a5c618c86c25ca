"""Every error that the client raises on purpose.

::

    ScissorhandsError                 the core's root
    └── ClientError                   has code and details, and what the server said beyond them
        ├── InvalidRequestError       fix the request: field, allowed
        ├── AccessDeniedError         no token, an unknown one, or one whose role does not allow the call
        ├── NotFoundError             no such model or session: field
        ├── OverloadedError           a bounded queue is full: try again after retry_after seconds
        ├── SessionConflictError      another turn of the conversation runs: wait for its end
        ├── ServerUnavailableError    nothing answers at the address, or it is shutting down
        ├── DeadlineExceededError     the call took longer than its timeout
        ├── RequestCancelledError     the call was cancelled, here or there
        └── ServerError               anything else; a fault of the server
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scissorhands.credentials import connection_hint
from scissorhands.errors import ScissorhandsError


@dataclass(frozen=True)
class FieldViolation:
    """One field that the server refused.

    Args:
        field: Path of the field, such as ``sampling.top_p``.
        description: What is wrong with it and what is allowed.
    """

    field: str
    description: str


@dataclass(frozen=True)
class ErrorInfo:
    """Everything that the server attached to a status.

    Args:
        violations: Fields that were refused.
        retry_after: When to try again, in seconds; None if the server did not say.
        reason: Reason of the error, from a closed set of the server; empty if it gave none.
        metadata: Further facts by name, such as the smallest valid budget.
    """

    violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


class ClientError(ScissorhandsError):
    """Root of the client's errors.

    Args:
        code: Status of the call.
        details: The server's message, or ours when the request did not leave.
        info: What the server attached.
    """

    def __init__(self, code: grpc.StatusCode, details: str, info: ErrorInfo | None = None) -> None:
        super().__init__(details or code.name)
        self.code = code
        self.details = details
        self.info = info or ErrorInfo()


class InvalidRequestError(ClientError):
    """A field of the request is missing, malformed or out of range."""

    @classmethod
    def local(cls, field: str, allowed: str) -> "InvalidRequestError":
        """Return the error for a field that was refused before anything was sent."""
        info = ErrorInfo(violations=(FieldViolation(field, allowed),))
        return cls(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {allowed}", info)

    @property
    def field(self) -> str:
        """Path of the first refused field; empty if the server named none."""
        return _first_field(self.info)

    @property
    def allowed(self) -> str:
        """What is wrong with the field and what is allowed."""
        return self.info.violations[0].description if self.info.violations else self.details

    @property
    def smallest_slots(self) -> int | None:
        """The smallest valid budget, in slots per layer and KV head, when the budget was below it."""
        smallest = self.info.metadata.get("smallest_slots", "")
        return int(smallest) if smallest.isdecimal() else None


class AccessDeniedError(ClientError):
    """The server asks for a token, does not know ours, or lets its role not make the call; the message says which."""


class NotFoundError(ClientError):
    """A named thing does not exist."""

    @property
    def field(self) -> str:
        """Path of the field that names it; empty if the server named none."""
        return _first_field(self.info)


class OverloadedError(ClientError):
    """A bounded queue of the server is full."""

    @property
    def retry_after(self) -> float:
        """When to try again, in seconds."""
        return self.info.retry_after or 0.0


class SessionConflictError(ClientError):
    """Another turn of the same conversation runs, or began meanwhile."""

    @property
    def retry_after(self) -> float:
        """When it is free at the latest if whoever runs it is gone, in seconds; 0 if the server did not say."""
        return self.info.retry_after or 0.0


class ServerUnavailableError(ClientError):
    """Nothing answers at the address, or what answers is shutting down."""

    @property
    def kept_session(self) -> str:
        """Session that goes on, on any worker, from where its answer broke off; empty if there is none."""
        return self.info.metadata.get("session_id", "")


class DeadlineExceededError(ClientError):
    """The call took longer than its timeout."""


class RequestCancelledError(ClientError):
    """The call was cancelled."""


class ServerError(ClientError):
    """A fault of the server."""


_CLASSES: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ABORTED: SessionConflictError,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


def from_rpc_error(error: grpc.RpcError) -> ClientError:
    """Turn what grpcio raised, sync or async, into one of ours."""
    code = error.code()
    info = _attached(error)
    # Also the code of a message beyond gRPC's size limit, where trying again is no use. Our servers always say when.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and info.retry_after is not None:
        return OverloadedError(code, error.details() or "", info)
    details = error.details() or ""
    hint = connection_hint(details)
    return _CLASSES.get(code, ServerError)(code, f"{details}; {hint}" if hint else details, info)


def _first_field(info: ErrorInfo) -> str:
    return info.violations[0].field if info.violations else info.metadata.get("field", "")


def _attached(error: Any) -> ErrorInfo:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        return ErrorInfo()  # Details that contradict their status, or are no status at all, say nothing.
    return ErrorInfo() if status is None else _read(status)


def _read(status: status_pb2.Status) -> ErrorInfo:
    violations: list[FieldViolation] = []
    retry_after: float | None = None
    reason = ""
    metadata: dict[str, str] = {}
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        # Unpack returns False for a message of another type and raises for one that cannot be parsed.
        try:
            if detail.Unpack(bad_request):
                violations.extend(FieldViolation(each.field, each.description) for each in bad_request.field_violations)
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            elif detail.Unpack(info):
                reason = info.reason
                metadata.update(info.metadata)
        except DecodeError:
            continue
    return ErrorInfo(tuple(violations), retry_after, reason, metadata)
