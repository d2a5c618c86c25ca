"""What a worker leaves behind when something fails around it: clients, the manager, the store, or the worker itself."""

import asyncio
import random
import signal
from contextlib import asynccontextmanager

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from support.delay_proxy import DelayProxy
from support.manager_process import ManagerProcess
from support.tiny_worker import collect, metrics, request, tiny_worker

from scissorhands.pool import LayerPool
from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc
from scissorhands_server.hosting import GrpcHost
from scissorhands_server.worker.engine import Engine
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.uploader import BATCH_BYTES, Uploader

# Far below a lease (30 s) and the life of a segment (600 s): what is gone by then did not just run out.
SECONDS = 15
GAUGES = ("rows", "queue_requests", "cache_slots", "cache_budget_slots", "cache_allocated_bytes", "cache_full_bytes")
WAITING = "scissorhands_worker_segment_queue_bytes"


def prompt(seed: int, length: int = 60) -> list[int]:
    return [random.Random(f"{seed}-{index}").randrange(3, 250) for index in range(length)]


@pytest.fixture
def pace(monkeypatch) -> None:
    """Slow the engine to the pace of a real model, so that streams last for seconds."""
    decode = Engine._decode

    def slowly(engine: Engine) -> None:
        decode(engine)
        engine._work.acquire()
        engine._work.wait(0.02)
        engine._work.release()

    monkeypatch.setattr(Engine, "_decode", slowly)


async def until(condition, what: str) -> None:
    deadline = asyncio.get_running_loop().time() + SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


def worker_is_idle(worker) -> bool:
    found = metrics(worker)
    return all(found[f"scissorhands_worker_{gauge}"] == 0 for gauge in GAUGES) and found[WAITING] == 0


def open_sessions(manager: ManagerProcess) -> float:
    return metrics(manager.metrics_port)['scissorhands_manager_sessions{state="open"}']


def manager_is_idle(manager: ManagerProcess) -> bool:
    return open_sessions(manager) == metrics(manager.metrics_port)["scissorhands_manager_store_bytes"] == 0


async def begin(stub, message, tokens: int = 1, **options):
    """Start a stream, read it until some tokens have come, and return the call and what reads the rest of it."""
    call = stub.Generate(message, **options)
    events = aiter(call)
    while tokens > 0:
        tokens -= len((await anext(events)).delta.token_ids)
    return call, events


class Manager(cache_manager_pb2_grpc.CacheManagerServiceServicer):
    """Writes down the calls that it gets."""

    def __init__(self):
        self.calls = []

    async def OffloadSegments(self, requests, context):  # noqa: N802 - the protocol's name
        del context
        epochs = [message.header.epoch async for message in requests if message.HasField("header")]
        self.calls.append(epochs)
        return cache_manager_pb2.OffloadSegmentsResponse(stored=len(epochs))

    async def CloseSession(self, message, context):  # noqa: N802 - the protocol's name
        del context
        self.calls.append(message.session_id)
        return cache_manager_pb2.CloseSessionResponse()


@asynccontextmanager
async def uploader_to(manager: Manager, *sessions: str):
    """Connect an uploader that holds sessions to a scripted manager."""
    host = GrpcHost(["scissorhands.v1.CacheManagerService"])
    cache_manager_pb2_grpc.add_CacheManagerServiceServicer_to_server(manager, host.server)
    address = f"127.0.0.1:{host.bind('127.0.0.1', 0)}"
    await host.start()
    registry = CollectorRegistry()
    link = ManagerLink(address, WorkerMetrics(registry, "tiny", 1, 1), SECONDS)
    uploader = Uploader(link, asyncio.get_running_loop(), 8 * BATCH_BYTES)
    await link.start()
    for session in sessions:
        link.hold(cache_manager_pb2.SessionSpec(session_id=session))
    uploader.start()
    try:
        yield uploader, registry.get_sample_value
    finally:
        await uploader.stop(0)
        await link.stop()
        await host.stop(0)


@pytest.mark.usefixtures("pace")
async def test_sessions_cancelled_while_the_manager_is_stopped_are_closed_when_it_goes_on(tmp_path):
    with ManagerProcess(tmp_path / "manager.log") as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            calls = [await begin(stub, request(prompt(seed), slots=30, new=400), 20) for seed in range(3)]
            assert open_sessions(manager) == 3
            manager.signal(signal.SIGSTOP)
            await until(lambda: metrics(worker)["scissorhands_worker_manager_up"] == 0, "the loss of the manager")
            for call, _ in calls:
                call.cancel()
            await until(lambda: worker_is_idle(worker), "the worker's gauges to be zero")
            manager.signal(signal.SIGCONT)
            await until(lambda: manager_is_idle(manager), "the manager's gauges to be zero")


@pytest.mark.usefixtures("pace")
async def test_segments_that_outlive_their_session_do_not_leave_it_open(tmp_path):
    with ManagerProcess(tmp_path / "manager.log") as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            _, events = await begin(stub, request(prompt(1), slots=30, new=120), 20)
            manager.kill()
            await until(lambda: metrics(worker)["scissorhands_worker_manager_up"] == 0, "the loss of the manager")
            finish = [event async for event in events][-1].finish
            assert metrics(worker)[WAITING] > 0
            manager.start()
            await until(lambda: metrics(worker)[WAITING] == 0, "the segments to leave")
            await until(lambda: open_sessions(manager) == 0, "the session's end")
            found = metrics(worker)
    assert found['scissorhands_worker_segments_total{result="dropped"}'] == finish.cache.segments_dropped == 0
    assert found['scissorhands_worker_segment_bytes_total{result="offloaded"}'] == finish.cache.segment_bytes


async def test_ends_of_sessions_do_not_wait_for_each_other():
    sessions = [str(number) for number in range(20)]

    class Meeting(Manager):
        def __init__(self):
            super().__init__()
            self.all_here = asyncio.Event()

        async def CloseSession(self, message, context):  # noqa: N802 - the protocol's name
            response = await super().CloseSession(message, context)
            if len(self.calls) == len(sessions):
                self.all_here.set()
            await self.all_here.wait()
            return response

    manager = Meeting()
    async with uploader_to(manager, *sessions) as (uploader, _):
        for session in sessions:
            uploader.end(session, discard=True)
        await until(manager.all_here.is_set, "all ends")
    assert sorted(manager.calls) == sorted(sessions)


async def test_an_end_waits_for_the_segments_of_its_own_session_only():
    first_upload = asyncio.Event()
    go_on = asyncio.Event()

    class Slow(Manager):
        async def OffloadSegments(self, requests, context):  # noqa: N802 - the protocol's name
            first_upload.set()
            await go_on.wait()
            return await super().OffloadSegments(requests, context)

    manager = Slow()
    async with uploader_to(manager, "long", "gone") as (uploader, value):
        for epoch in range(3):
            assert uploader.stage("long", epoch, bytes(BATCH_BYTES - 1))
        uploader.end("long", discard=False)
        await asyncio.wait_for(first_upload.wait(), SECONDS)
        assert uploader.stage("gone", 7, b"segment")
        uploader.end("gone", discard=True)
        go_on.set()
        await until(lambda: "long" in manager.calls, "the last end")
        assert value(WAITING) == 0
    assert manager.calls == [[0], "gone", [1], [2], "long"]
    assert value("scissorhands_worker_segments_total", {"result": "offloaded"}) == 3
    assert value("scissorhands_worker_segments_total", {"result": "dropped"}) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
async def test_segments_and_ends_that_a_manager_refuses_for_a_while_are_not_lost(code):
    """INTERNAL is how grpc reports a connection that breaks while a message is being written."""
    refusing = True

    class Full(Manager):
        async def OffloadSegments(self, requests, context):  # noqa: N802 - the protocol's name
            if refusing:
                await context.abort(code, "busy")
            return await super().OffloadSegments(requests, context)

        async def CloseSession(self, message, context):  # noqa: N802 - the protocol's name
            if refusing and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                await context.abort(code, "busy")
            return await super().CloseSession(message, context)

    def free() -> None:
        nonlocal refusing
        refusing = False

    manager = Full()
    async with uploader_to(manager, "one", "two") as (uploader, value):
        asyncio.get_running_loop().call_later(0.2, free)
        assert uploader.stage("one", 0, b"segment")
        uploader.end("one", discard=False)
        uploader.end("two", discard=True)
        await until(lambda: {"one", "two"} <= {call for call in manager.calls if isinstance(call, str)}, "both ends")
        assert value(WAITING) == 0
    assert [0] in manager.calls
    assert value("scissorhands_worker_segments_total", {"result": "dropped"}) == 0


async def test_a_client_that_leaves_while_its_session_is_opened_leaves_no_session(tmp_path):
    with ManagerProcess(tmp_path / "manager.log") as manager:
        async with (
            DelayProxy(manager.port, 0.15) as proxy,
            tiny_worker(manager=f"127.0.0.1:{proxy.port}") as (worker, stub),
        ):
            calls = [stub.Generate(request(prompt(seed), new=400)) for seed in range(5)]
            await until(lambda: open_sessions(manager) == 5, "the sessions")  # Their grants are still on their way.
            for call in calls:
                call.cancel()
            await until(lambda: manager_is_idle(manager), "the manager's gauges to be zero")
            assert metrics(worker)['scissorhands_worker_requests_total{model_name="tiny",result="cancelled"}'] == 5
            assert worker_is_idle(worker)


async def test_a_codec_that_the_worker_lacks_costs_the_segments_and_not_the_answer(tmp_path):
    message = request(prompt(1), slots=30, new=60)
    async with tiny_worker() as (_, stub):
        expected, _, _ = await collect(stub.Generate(message))
    with ManagerProcess(tmp_path / "manager.log", options=("--codec", "later")) as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            tokens, _, last = await collect(stub.Generate(message))
            dropped = metrics(worker)['scissorhands_worker_segments_total{result="dropped"}']
    assert tokens == expected
    assert dropped == last.finish.cache.segments_dropped == last.finish.cache.evictions > 0


@pytest.mark.usefixtures("pace")
async def test_a_row_that_cannot_be_freed_ends_all_streams_and_the_next_request_works(monkeypatch):
    """Freeing copies what stays, and memory may be what is short: then no row's slots are certain any more."""
    remove = LayerPool.remove_last_row
    removals = 0

    def remove_last_row(pool: LayerPool, into: int) -> None:
        nonlocal removals
        removals += 1
        if removals == 2:  # The first row's second layer.
            raise torch.OutOfMemoryError("injected")
        remove(pool, into)

    async with tiny_worker(rows=2) as (worker, stub):
        expected, _, _ = await collect(stub.Generate(request(prompt(3), slots=30, new=30)))
        monkeypatch.setattr(LayerPool, "remove_last_row", remove_last_row)
        results = await asyncio.gather(
            *(collect(stub.Generate(request(prompt(seed), slots=30, new=20), timeout=SECONDS)) for seed in range(3)),
            return_exceptions=True,
        )
        assert [result.code() for result in results] == [grpc.StatusCode.INTERNAL] * 3
        assert worker_is_idle(worker)
        assert metrics(worker)['scissorhands_worker_requests_total{model_name="tiny",result="error"}'] == 3
        tokens, _, _ = await collect(stub.Generate(request(prompt(3), slots=30, new=30), timeout=SECONDS))
        assert tokens == expected


@pytest.mark.usefixtures("pace")
async def test_a_short_lease_is_renewed_in_time(tmp_path):
    with ManagerProcess(tmp_path / "manager.log", options=("--lease", "2")) as manager:
        async with tiny_worker(manager=manager.address) as (_, stub):
            _, events = await begin(
                stub, request(prompt(1), policy="full", new=150)
            )  # Without plans, which renew it too.
            states = set()
            for _ in range(110):
                await anext(events)
                states.add(open_sessions(manager))
    assert states == {1}
