"""How a manager stops: calls in progress get their grace, health tells that it goes, a second signal ends the wait."""

import asyncio
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.manager_data import opened, plan_parts, requests_of, snapshot, spec

from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc
from scissorhands_server.hosting import address

NOWHERE = "redis://127.0.0.1:1/0"


class PlanInTwoHalves:
    """A plan whose snapshot stops in the middle until it is let go."""

    def __init__(self, stub, session, evidence):
        self._messages = requests_of(plan_parts(evidence, session))
        self._go_on = asyncio.Event()
        self._half_sent = asyncio.Event()
        self._stub = stub
        self.call = stub.PlanEvictions(self._halves(), timeout=120)

    async def _halves(self):
        for message in self._messages[:2]:
            yield message
        self._half_sent.set()
        await self._go_on.wait()
        for message in self._messages[2:]:
            yield message

    async def arrive(self):
        """Wait until the manager has the first half: what is sent later on the same connection arrives later."""
        await asyncio.wait_for(self._half_sent.wait(), 30)
        await self._stub.ListSessions(cache_manager_pb2.ListSessionsRequest(), timeout=30)

    async def finish(self):
        self._go_on.set()
        return await self.call


async def refuses(stub):
    """Wait until the manager takes no new calls."""
    while True:
        try:
            await stub.OpenSession(cache_manager_pb2.OpenSessionRequest(session=spec("new")), timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return
        await asyncio.sleep(0.02)


@pytest.fixture
def manager(start_manager):
    return start_manager(store_url=NOWHERE, grace=100, stream_timeout=100)


async def test_a_call_in_progress_is_finished_and_health_tells(manager):
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        session = await opened(stub, spec())
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        plan = PlanInTwoHalves(stub, session, snapshot(session))
        await plan.arrive()
        manager.send(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert len((await plan.finish()).results[0].plan.layers) == 2
        watch.cancel()
    assert manager.wait() == 0


async def test_a_second_signal_ends_the_grace(manager):
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        session = await opened(stub, spec())
        plan = PlanInTwoHalves(stub, session, snapshot(session))
        await plan.arrive()
        manager.send(signal.SIGTERM)
        await refuses(stub)
        manager.send(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError):
            await plan.call
    assert manager.wait() == 0


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", "localhost:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("::", "[::]:5")]
)
def test_addresses(host, expected):
    assert address(host, 5) == expected


async def test_a_manager_listens_on_ipv6(start_manager, connect):
    manager = start_manager(store_url=NOWHERE, host="::1")
    assert manager.address.startswith("[::1]:")
    assert manager.metric("store_up") == 0
    async with connect(manager) as stub:
        await opened(stub, spec())
