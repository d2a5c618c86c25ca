"""Two managers behind one name: any of them answers any call, and one that goes costs nothing."""

import asyncio
import itertools
import signal

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from support.conversations import FIRST, converse, workers
from support.manager_data import fetch, offload, opened, planned, same_plan, segment, snapshot, spec
from support.processes import ManagerProcess
from support.tiny_worker import collect, metrics, request, tiny_worker
from support.waiting import SECONDS, until
from support.worker_process import worker_process

from scissorhands.v1 import cache_manager_pb2, generation_pb2_grpc
from scissorhands_server.hosting import GrpcHost
from scissorhands_server.worker import uploader
from scissorhands_server.worker.balancing import balanced_channel
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.metrics import WorkerMetrics

MESSAGE = request(FIRST, slots=40, new=400)


@pytest.fixture
def managers(start_manager, redis_server):
    return [start_manager(store_url=redis_server.url) for _ in range(2)]


def name_of(managers) -> str:
    return "ipv4:" + ",".join(manager.address for manager in managers)


def plans(manager: ManagerProcess) -> float:
    return metrics(manager.metrics_port)['scissorhands_manager_plans_total{result="computed"}']


def grants(manager: ManagerProcess) -> float:
    return metrics(manager.metrics_port)['scissorhands_manager_grants_total{result="granted"}']


async def answer(stub, disturb=lambda: None):
    """Return the tokens and the end of an answer; ``disturb`` is called in the middle of it."""
    tokens, events = [], aiter(stub.Generate(MESSAGE, timeout=60))
    while len(tokens) < 20:
        tokens += (await anext(events)).delta.token_ids
    disturb()
    more, _, last = await collect(events)
    return tokens + more, last.finish


async def test_calls_take_turns_and_none_fails_while_a_manager_is_killed(managers):
    link = ManagerLink(name_of(managers), WorkerMetrics(CollectorRegistry(), "tiny", 1, 1), SECONDS)
    await link.start()
    try:
        # Which of the two is connected first is open.
        numbers = itertools.count()
        while not all(grants(manager) for manager in managers):
            await link.open(spec(f"before-{next(numbers)}"))
        before = [grants(manager) for manager in managers]
        for number in range(30):
            assert await link.open(spec(f"both-{number}"))
        assert [grants(manager) - count for manager, count in zip(managers, before, strict=True)] == [15, 15]
        managers[0].kill()
        for number in range(30):
            assert await link.open(spec(f"one-{number}"))
            assert link.up
        assert grants(managers[1]) == before[1] + 45
    finally:
        await link.stop()


async def test_a_manager_that_is_killed_in_the_middle_of_an_answer_costs_nothing(managers, caplog):
    first, second = managers
    async with tiny_worker() as (_, stub):
        expected, _, _ = await collect(stub.Generate(MESSAGE))
    async with tiny_worker(manager=name_of(managers), manager_deadline=SECONDS) as (worker, stub):
        undisturbed, _ = await answer(stub)
        assert undisturbed == expected
        assert plans(first) > 0
        before = plans(second)
        assert before > 0
        tokens, _ = await answer(stub, first.kill)
        assert tokens == expected
        assert plans(second) > before
        await until(lambda: metrics(worker)["scissorhands_worker_segment_queue_bytes"] == 0, "the segments to leave")
        assert metrics(worker)['scissorhands_worker_segments_total{result="dropped"}'] == 0
        assert "going on without it" not in caplog.text


async def test_a_manager_that_hangs_in_the_middle_of_an_answer_is_left_out(managers, monkeypatch):
    monkeypatch.setattr(uploader, "UPLOAD_DEADLINE_SECONDS", 2)
    first, second = managers
    async with tiny_worker() as (_, stub):
        expected, _, _ = await collect(stub.Generate(MESSAGE))
    async with tiny_worker(manager=name_of(managers), manager_deadline=0.5) as (worker, stub):
        await answer(stub)
        tokens, _ = await answer(stub, lambda: first.send(signal.SIGSTOP))
        assert tokens == expected

        def failed() -> float:
            return metrics(worker)['scissorhands_worker_manager_errors_total{reason="deadline"}']

        await until(failed, "a call that gets no answer")
        # Whatever was sent to it has failed by then, and is done at the other.
        await until(lambda: metrics(worker)["scissorhands_worker_segment_queue_bytes"] == 0, "the segments to leave")
        before = plans(second)
        tokens, finish = await answer(stub)
        assert tokens == expected
        assert plans(second) - before >= finish.cache.plans_manager > 0


async def test_clients_connect_anew_now_and_then_and_no_call_fails():
    host = GrpcHost([], connection_seconds=0.3)
    port = host.bind("127.0.0.1", 0)
    await host.start()
    ports = set()
    try:
        async with balanced_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)

            def connected() -> bool:
                found = psutil.Process().net_connections("tcp")
                ports.update(each.laddr.port for each in found if each.raddr and each.raddr.port == port)
                return len(ports) >= 3

            deadline = asyncio.get_running_loop().time() + SECONDS
            while not connected():
                assert asyncio.get_running_loop().time() < deadline
                assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)).status
    finally:
        await host.stop(0)


async def test_a_session_opened_at_one_manager_is_planned_at_another_and_closed_at_the_first(managers, connect):
    async with connect(managers[0]) as first, connect(managers[1]) as second:
        session = await opened(first, spec("s1", "h2o"))
        evidence = snapshot(session)
        plan = await planned(second, session, evidence)
        assert same_plan(plan, session, evidence)
        stored = await offload(second, session, (0, segment(session)))
        assert stored.stored == 1
        assert set(await fetch(first, "s1")) == {0}
        closing = cache_manager_pb2.CloseSessionRequest(session_id="s1", discard_segments=True)
        await first.CloseSession(closing, timeout=10)
        # The second remembers the session until its lease ends, but the segments are gone for both.
        assert await fetch(second, "s1") == {}


async def test_a_manager_finds_out_what_another_has_deleted(start_manager, redis_server, connect):
    managers = [start_manager(store_url=redis_server.url, lease=1) for _ in range(2)]
    async with connect(managers[0]) as first, connect(managers[1]) as second:
        session = await opened(first, spec("s1", "h2o"))
        await offload(second, session, (0, segment(session)))
        assert managers[1].metric("store_bytes") > 0
        closing = cache_manager_pb2.CloseSessionRequest(session_id="s1", discard_segments=True)
        await first.CloseSession(closing, timeout=10)
        await until(lambda: managers[1].metric("store_bytes") == 0, "the second manager to look")
        assert managers[1].metric('sessions{state="open"}') == 0


async def test_a_conversation_of_one_pair_goes_on_in_another(managers, tmp_path):
    """Each worker knows one manager only; the store is all that they share."""
    more = {"policy": "h2o", "slots": 40, "session_id": "c1"}
    with (
        worker_process(tmp_path / "one.log", "--manager", managers[0].address) as (_, one),
        worker_process(tmp_path / "two.log", "--manager", managers[1].address) as (_, two),
    ):
        async with grpc.aio.insecure_channel(one) as channel, grpc.aio.insecure_channel(two) as other:
            stubs = [generation_pb2_grpc.GenerationServiceStub(each) for each in (channel, other, channel)]
            kept, resumed = await converse(stubs, **more)
    async with workers(managers[0], 1) as ((_, stub),):
        stayed, _ = await converse([stub] * 3, **{**more, "session_id": "c2"})
    assert kept == stayed
    assert resumed[0] == 0
    assert all(resumed[1:])
