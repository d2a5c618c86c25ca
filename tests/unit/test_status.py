"""From exceptions to status: the table, the details, and the interceptor on a real server."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scissorhands import errors
from scissorhands.v1 import cache_manager_pb2 as pb
from scissorhands.v1 import cache_manager_pb2_grpc
from scissorhands_server.hosting import GrpcHost
from scissorhands_server.status import (
    ERROR_DOMAIN,
    MAX_MESSAGE_BYTES,
    STATUS_TABLE,
    StatusInterceptor,
    status_message,
    status_row,
)

SERVICE = "scissorhands.v1.CacheManagerService"
LEAVES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ScissorhandsError)
]


def detail(status, kind):
    """Return the one detail of a kind, None if there is none."""
    found = [any_ for any_ in status.details if any_.Is(kind.DESCRIPTOR)]
    if not found:
        return None
    (one,) = found
    message = kind()
    one.Unpack(message)
    return message


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_has_a_row_of_its_own(kind):
    assert kind in STATUS_TABLE


def test_reasons_are_distinct():
    assert len({row.reason for row in STATUS_TABLE.values()}) == len(STATUS_TABLE)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequestError("a", "b"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.BudgetTooSmallError("a", "b", 3), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFoundError("a", "b"), grpc.StatusCode.NOT_FOUND),
        (errors.CapacityError("full", 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.StoreUnavailableError("down"), grpc.StatusCode.UNAVAILABLE),
        (errors.ManagerUnavailableError("down"), grpc.StatusCode.UNAVAILABLE),
        (errors.StoppingError(), grpc.StatusCode.UNAVAILABLE),
        (errors.SessionConflictError("taken"), grpc.StatusCode.ABORTED),
        (errors.CorruptSegmentError("bad"), grpc.StatusCode.DATA_LOSS),
        (errors.CorruptRowError("bad"), grpc.StatusCode.DATA_LOSS),
        (errors.MissingPartError("gone"), grpc.StatusCode.NOT_FOUND),
        (errors.EngineError("bug"), grpc.StatusCode.INTERNAL),
    ],
)
def test_codes_and_error_info(error, code):
    status = status_message(error)
    assert status.code == code.value[0]
    assert status.message == str(error)
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == (ERROR_DOMAIN, status_row(error).reason)


def test_a_new_kind_of_error_inherits_its_parents_row():
    class Odd(errors.StoreUnavailableError):
        pass

    assert status_row(Odd("x")) is STATUS_TABLE[errors.StoreUnavailableError]


def test_bad_input_names_the_field():
    status = status_message(errors.InvalidRequestError("sampling.top_p", "must be at most 1"))
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "must be at most 1")


def test_a_small_budget_tells_the_smallest():
    status = status_message(errors.BudgetTooSmallError("budget.tokens", "too small", 37))
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert violation.field == "budget.tokens"
    assert detail(status, error_details_pb2.ErrorInfo).metadata["smallest_slots"] == "37"


@pytest.mark.parametrize("kind", [errors.CapacityError, errors.SessionConflictError])
def test_what_is_taken_tells_when_to_try_again(kind):
    status = status_message(kind("taken", 1.25))
    delay = detail(status, error_details_pb2.RetryInfo).retry_delay
    assert (delay.seconds, delay.nanos) == (1, 250_000_000)


def test_a_server_that_stops_tells_what_it_keeps():
    for kept in ("c1", ""):
        status = status_message(errors.StoppingError(kept))
        assert detail(status, error_details_pb2.ErrorInfo).metadata["session_id"] == kept
        assert ("goes on" in status.message) is bool(kept)


@pytest.mark.parametrize("kind", [error_details_pb2.BadRequest, error_details_pb2.RetryInfo])
def test_other_errors_carry_no_such_detail(kind):
    assert detail(status_message(errors.NotFoundError("session_id", "none")), kind) is None


class Raising(cache_manager_pb2_grpc.CacheManagerServiceServicer):
    """Raises what it is given, from each kind of method."""

    __abstractmethods__ = frozenset()

    def __init__(self, error):
        self.error = error
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def GetSession(self, request, context):  # noqa: N802 - Named by the protocol.
        raise self.error

    async def FetchSegments(self, request, context):  # noqa: N802 - Named by the protocol.
        yield pb.FetchSegmentsResponse(epoch=1)
        raise self.error

    async def OffloadSegments(self, request_iterator, context):  # noqa: N802 - Named by the protocol.
        async for _ in request_iterator:
            pass
        raise self.error

    async def CloseSession(self, request, context):  # noqa: N802 - Named by the protocol.
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "its own")

    async def ListSessions(self, request, context):  # noqa: N802 - Named by the protocol.
        return pb.ListSessionsResponse(next_page_token="fine")

    async def OpenSession(self, request, context):  # noqa: N802 - Named by the protocol.
        self.entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def serving(error=None):
    servicer, seen = Raising(error), []
    interceptor = StatusInterceptor((SERVICE,), lambda method, code: seen.append((method.rpartition("/")[2], code)))
    host = GrpcHost([SERVICE], [interceptor])
    cache_manager_pb2_grpc.add_CacheManagerServiceServicer_to_server(servicer, host.server)
    port = host.bind("127.0.0.1", 0)
    await host.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield cache_manager_pb2_grpc.CacheManagerServiceStub(channel), servicer, seen
    finally:
        await host.stop(0)


async def call(stub, method):
    if method == "GetSession":
        await stub.GetSession(pb.GetSessionRequest(), timeout=10)
    elif method == "OffloadSegments":
        await stub.OffloadSegments(iter([pb.OffloadSegmentsRequest()]), timeout=10)
    else:
        async for _ in stub.FetchSegments(pb.FetchSegmentsRequest(), timeout=10):
            pass


@pytest.mark.parametrize("method", ["GetSession", "OffloadSegments", "FetchSegments"])
async def test_every_kind_of_call_ends_with_the_status(method):
    async with serving(errors.CapacityError("full", 2)) as (stub, _, seen):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, method)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)
        assert detail(status, error_details_pb2.RetryInfo).retry_delay.seconds == 2
        assert seen == [(method, "RESOURCE_EXHAUSTED")]


@pytest.mark.parametrize("method", ["GetSession", "OffloadSegments", "FetchSegments"])
async def test_what_nobody_foresaw_is_logged_and_told_to_nobody(method, caplog):
    async with serving(ValueError("a secret")) as (stub, _, seen):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, method)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()
        assert detail(rpc_status.from_call(caught.value), error_details_pb2.ErrorInfo).reason == "INTERNAL"
        assert "a secret" in caplog.text
        assert seen == [(method, "INTERNAL")]
        assert (await stub.ListSessions(pb.ListSessionsRequest(), timeout=10)).next_page_token == "fine"


async def test_a_servicers_own_abort_passes_through():
    async with serving() as (stub, _, seen):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CloseSession(pb.CloseSessionRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        while not seen:  # The answer may overtake the end of the call.
            await asyncio.sleep(0.01)
        assert seen == [("CloseSession", "ALREADY_EXISTS")]


async def test_a_cancelled_call_is_cancelled_in_the_servicer():
    async with serving() as (stub, servicer, seen):
        pending = stub.OpenSession(pb.OpenSessionRequest(), timeout=30)
        waiting = asyncio.ensure_future(pending)
        await asyncio.wait_for(servicer.entered.wait(), 10)
        pending.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while not seen:
            await asyncio.sleep(0.01)
        assert seen == [("OpenSession", "CANCELLED")]


@pytest.mark.parametrize("letter", ["x", "€", "\U0001f600"])
async def test_a_message_that_quotes_a_huge_input_still_arrives(letter):
    async with serving(errors.InvalidRequestError(letter * 5000, letter * 100_000)) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, "GetSession")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert MAX_MESSAGE_BYTES - 8 < len(caught.value.details().encode()) <= MAX_MESSAGE_BYTES
        assert detail(rpc_status.from_call(caught.value), error_details_pb2.BadRequest) is not None
