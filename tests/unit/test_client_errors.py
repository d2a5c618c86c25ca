import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scissorhands.errors import ScissorhandsError
from scissorhands_client import (
    AccessDeniedError,
    ClientError,
    DeadlineExceededError,
    ErrorInfo,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
    SessionConflictError,
)
from scissorhands_client.errors import from_rpc_error


class FailedCall(grpc.RpcError):
    """What grpcio raises, as far as we look at it."""

    def __init__(self, code, details="", trailing=()):
        super().__init__()
        self._parts = (code, details, trailing)

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]


def failed(code, message, *details):
    packed = []
    for detail in details:
        packed.append(Any())
        packed[-1].Pack(detail)
    status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))
    return FailedCall(code, message, status.trailing_metadata)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_code_has_an_error_that_keeps_it(code):
    expected = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
        grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
        grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
        grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        grpc.StatusCode.CANCELLED: RequestCancelledError,
        grpc.StatusCode.ABORTED: SessionConflictError,
    }
    error = from_rpc_error(FailedCall(code, "why"))
    assert type(error) is expected.get(code, ServerError)
    assert isinstance(error, ClientError)
    assert isinstance(error, ScissorhandsError)
    assert (error.code, error.details, error.info, str(error)) == (code, "why", ErrorInfo(), "why")


def test_details_are_read():
    violations = [
        error_details_pb2.BadRequest.FieldViolation(field="top_p", description="at most 1"),
        error_details_pb2.BadRequest.FieldViolation(field="top_k", description="at least 0"),
    ]
    error = from_rpc_error(
        failed(
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad",
            error_details_pb2.ErrorInfo(reason="BUDGET_TOO_SMALL", metadata={"smallest_slots": "52"}),
            error_details_pb2.BadRequest(field_violations=violations),
            error_details_pb2.Help(),
        )
    )
    assert isinstance(error, InvalidRequestError)
    assert error.info.violations == (FieldViolation("top_p", "at most 1"), FieldViolation("top_k", "at least 0"))
    assert error.info.reason == "BUDGET_TOO_SMALL"
    assert (error.field, error.allowed, error.smallest_slots) == ("top_p", "at most 1", 52)


def test_a_field_that_only_the_facts_name_is_found():
    info = error_details_pb2.ErrorInfo(reason="NOT_FOUND", metadata={"field": "session_id"})
    error = from_rpc_error(failed(grpc.StatusCode.NOT_FOUND, "none", info))
    assert isinstance(error, NotFoundError)
    assert error.field == "session_id"


def test_overload_needs_a_time_to_come_back():
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    error = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry))
    assert isinstance(error, OverloadedError)
    assert error.retry_after == 1.5
    # gRPC itself uses the code for a message that is too large; to send it again is no use.
    assert isinstance(from_rpc_error(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large")), ServerError)


@pytest.mark.parametrize(
    "value",
    [
        b"\xff\xff",
        status_pb2.Status(code=5, message="other").SerializeToString(),
        status_pb2.Status(
            code=3, message="why", details=[Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff")]
        ).SerializeToString(),
    ],
)
def test_malformed_details_hide_nothing(value):
    error = from_rpc_error(FailedCall(grpc.StatusCode.INVALID_ARGUMENT, "why", (("grpc-status-details-bin", value),)))
    assert isinstance(error, InvalidRequestError)
    assert (error.details, error.allowed, error.field, error.info) == ("why", "why", "", ErrorInfo())


def test_no_metadata_at_all():
    assert from_rpc_error(FailedCall(grpc.StatusCode.UNAVAILABLE, None, None)).details == ""
