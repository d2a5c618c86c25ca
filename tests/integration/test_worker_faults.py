"""What a worker leaves behind when something fails around it: clients, the manager, the store, or the worker itself."""

import asyncio
import random
import signal

import grpc
import pytest
import torch
from support.processes import ManagerProcess
from support.tiny_worker import collect, metrics, request, tiny_worker
from support.waiting import SECONDS, until
from support.worker_process import worker_process

from benchmarks.delay_proxy import DelayProxy
from scissorhands.formats import FAMILIES, parse
from scissorhands.layer_pool import LayerPool
from scissorhands.v1 import budget_pb2, generation_pb2, generation_pb2_grpc
from scissorhands_server.worker import service
from scissorhands_server.worker.engine import Engine

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


@pytest.mark.usefixtures("pace")
async def test_sessions_cancelled_while_the_manager_is_stopped_are_closed_when_it_goes_on():
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            calls = [await begin(stub, request(prompt(seed), slots=30, new=400), 20) for seed in range(3)]
            assert open_sessions(manager) == 3
            manager.send(signal.SIGSTOP)
            await until(lambda: metrics(worker)["scissorhands_worker_manager_up"] == 0, "the loss of the manager")
            for call, _ in calls:
                call.cancel()
            await until(lambda: worker_is_idle(worker), "the worker's gauges to be zero")
            manager.send(signal.SIGCONT)
            await until(lambda: manager_is_idle(manager), "the manager's gauges to be zero")


@pytest.mark.usefixtures("pace")
async def test_segments_that_outlive_their_session_do_not_leave_it_open():
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            _, events = await begin(stub, request(prompt(1), slots=30, new=120), 20)
            manager.kill()
            await until(lambda: metrics(worker)["scissorhands_worker_manager_up"] == 0, "the loss of the manager")
            finish = [event async for event in events][-1].finish
            assert metrics(worker)[WAITING] > 0
            manager.restart()
            await until(lambda: metrics(worker)[WAITING] == 0, "the segments to leave")
            await until(lambda: open_sessions(manager) == 0, "the session's end")
            found = metrics(worker)
    assert found['scissorhands_worker_segments_total{result="dropped"}'] == finish.cache.segments_dropped == 0
    assert found['scissorhands_worker_segment_bytes_total{result="offloaded"}'] == finish.cache.segment_bytes


async def test_a_client_that_leaves_while_its_session_is_opened_leaves_no_session():
    with ManagerProcess() as manager:
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


async def test_a_codec_that_the_worker_lacks_costs_the_segments_and_not_the_answer(monkeypatch):
    """As when the manager is newer."""
    message = request(prompt(1), slots=30, new=60)
    async with tiny_worker() as (_, stub):
        expected, _, _ = await collect(stub.Generate(message))
    # Another table instead of a changed one: putting an entry back would move it to the end.
    others = {name: family for name, family in FAMILIES.items() if name != "int4"}
    monkeypatch.setattr("scissorhands.formats.FAMILIES", others)
    parse.cache_clear()
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            tokens, _, last = await collect(stub.Generate(message))
            dropped = metrics(worker)['scissorhands_worker_segments_total{result="dropped"}']
    assert tokens == expected
    assert dropped == last.finish.cache.segments_dropped == last.finish.cache.evictions > 0


@pytest.mark.usefixtures("pace")
async def test_a_row_that_cannot_be_freed_ends_all_streams_and_the_next_request_works(monkeypatch):
    """Then no row's slots are certain any more."""
    move = LayerPool.move_last_row
    removals = 0

    def move_last_row(pool: LayerPool, into: int) -> None:
        nonlocal removals
        removals += 1
        if removals == 2:  # The first row's second layer.
            raise RuntimeError("injected")
        move(pool, into)

    async with tiny_worker(rows=2) as (worker, stub):
        expected, _, _ = await collect(stub.Generate(request(prompt(3), slots=30, new=30)))
        monkeypatch.setattr(LayerPool, "move_last_row", move_last_row)
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
@pytest.mark.parametrize("method", ["add_row", "release_hidden"])
async def test_memory_that_runs_out_halfway_costs_one_request_at_most(method, monkeypatch):
    """In the second layer of the second row that comes, or goes; all rows share a pool."""
    messages = [request(prompt(seed), slots=30, new=20 + 15 * seed) for seed in range(3)]
    async with tiny_worker() as (_, stub):
        expected = [(await collect(stub.Generate(message)))[0] for message in messages]
    plain, calls = getattr(LayerPool, method), 0

    def failing(pool: LayerPool) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("injected")
        plain(pool)

    monkeypatch.setattr(LayerPool, method, failing)
    async with tiny_worker() as (worker, stub):
        results = await asyncio.gather(
            *(collect(stub.Generate(message, timeout=SECONDS)) for message in messages), return_exceptions=True
        )
        assert calls > 4
        failed = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert [error.code() for error in failed] == ([grpc.StatusCode.INTERNAL] if method == "add_row" else [])
        assert worker.cache.allocated_bytes() == 0
    for result, tokens in zip(results, expected, strict=True):
        assert result in failed or result[0] == tokens


@pytest.mark.usefixtures("pace")
async def test_a_short_lease_is_renewed_in_time():
    with ManagerProcess(lease=2) as manager:
        async with tiny_worker(manager=manager.address) as (_, stub):
            _, events = await begin(
                stub, request(prompt(1), policy="full", new=150)
            )  # Without plans, which renew it too.
            states = set()
            for _ in range(110):
                await anext(events)
                states.add(open_sessions(manager))
    assert states == {1}


async def test_a_long_queue_can_be_filled_and_the_worker_still_answers():
    async with tiny_worker(rows=1, queue=1100) as (worker, stub):
        calls = [stub.Generate(request(prompt(1, 5), policy="full", new=500)) for _ in range(1101)]
        accepted = await asyncio.gather(*(call.read() for call in calls))
        assert max(event.accepted.queued_ahead for event in accepted) > 1024
        assert (await stub.GetModel(generation_pb2.GetModelRequest())).max_queued == 1100
        for call in calls:
            call.cancel()
        await until(lambda: worker_is_idle(worker), "the worker's gauges to be zero")


@pytest.mark.usefixtures("pace")
async def test_a_deadline_in_the_middle_frees_the_row_and_closes_the_session():
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            _, events = await begin(stub, request(prompt(1), slots=30, new=400), 20, timeout=2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [event async for event in events]
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: worker_is_idle(worker), "the worker's gauges to be zero")
            await until(lambda: manager_is_idle(manager), "the manager's gauges to be zero")
            found = metrics(worker)
    assert found['scissorhands_worker_requests_total{model_name="tiny",result="cancelled"}'] == 1
    assert 20 <= found["scissorhands_worker_generated_tokens_total"] < 400


async def test_fifty_cancelled_streams_leave_every_gauge_at_zero():
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address, rows=4, queue=64) as (worker, stub):
            calls = [stub.Generate(request(prompt(seed), slots=30, new=400)) for seed in range(50)]
            for place, call in enumerate(calls):
                await call.read()
                if place % 3 == 0:
                    call.cancel()
            await until(lambda: metrics(worker)[WAITING] > 0 or not manager_is_idle(manager), "segments")
            for call in calls:
                call.cancel()
            await until(lambda: worker_is_idle(worker), "the worker's gauges to be zero")
            await until(lambda: manager_is_idle(manager), "the manager's gauges to be zero")
            found = metrics(worker)
    assert found['scissorhands_worker_requests_total{model_name="tiny",result="cancelled"}'] == 50


async def test_a_store_that_is_down_costs_the_segments_and_not_a_token(redis_server):
    message = request(prompt(1), slots=30, new=100)
    async with tiny_worker() as (_, stub):
        expected, _, _ = await collect(stub.Generate(message))
    with ManagerProcess(store_url=redis_server.url) as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            redis_server.kill()
            tokens, _, last = await collect(stub.Generate(message))
            assert tokens == expected
            assert last.finish.cache.segments > 3
            await until(lambda: worker_is_idle(worker), "the segments to leave")
            found, told = metrics(worker), metrics(manager.metrics_port)
    assert found['scissorhands_worker_segments_total{result="dropped"}'] == last.finish.cache.segments
    assert found['scissorhands_worker_segment_bytes_total{result="dropped"}'] == last.finish.cache.segment_bytes
    assert found['scissorhands_worker_segments_total{result="offloaded"}'] == 0
    refused = told['scissorhands_manager_segments_refused_total{reason="store_unavailable"}']
    assert refused == last.finish.cache.segments


@pytest.mark.parametrize(("grace", "new", "all_done"), [(30, 60, True), (1, 440, False)])
async def test_sigterm_gives_running_streams_the_grace_and_exits(grace, new, all_done, tmp_path):
    async def outcome(events) -> str:
        try:
            last = [event async for event in events][-1]
        except grpc.aio.AioRpcError as error:
            return error.code().name
        assert last.finish.usage.generated_tokens == new
        return "done"

    with worker_process(tmp_path / "worker.log", "--grace", str(grace)) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            streams = [aiter(stub.Generate(request(prompt(seed), slots=30, new=new))) for seed in range(16)]
            for events in streams:
                assert (await anext(events)).HasField("accepted")
            process.terminate()
            outcomes = set(await asyncio.gather(*(outcome(events) for events in streams)))
            assert await asyncio.to_thread(process.wait, grace + SECONDS) == 0
    assert outcomes <= {"done", "UNAVAILABLE"}
    assert all_done == (outcomes == {"done"})


async def test_times_count_from_the_arrival_of_the_request():
    """Opening the session is part of what a client waits for."""
    delay = 0.1
    with ManagerProcess() as manager:
        async with (
            DelayProxy(manager.port, delay) as proxy,
            tiny_worker(manager=f"127.0.0.1:{proxy.port}") as (worker, stub),
        ):
            await until(lambda: metrics(worker)["scissorhands_worker_manager_up"] == 1, "the manager")
            _, _, last = await collect(stub.Generate(request(prompt(1), new=5)))
            found = metrics(worker)
    usage = last.finish.usage
    assert usage.time_to_first_token.ToTimedelta().total_seconds() > 2 * delay
    assert usage.queue_time.ToTimedelta().total_seconds() > 2 * delay
    assert found["scissorhands_worker_time_to_first_token_seconds_sum"] > 2 * delay


async def test_decoding_does_not_wait_for_the_plans_of_another_prompt():
    """Without a manager, one token is decoded for each chunk of the prompt; waiting for plans must only add to them."""
    message = request(prompt(2, 200), slots=60, policy="h2o", new=5)
    async with tiny_worker() as (_, stub):
        expected, _, _ = await collect(stub.Generate(message))
    with ManagerProcess() as manager:
        async with (
            DelayProxy(manager.port, 0.05) as proxy,
            tiny_worker(manager=f"127.0.0.1:{proxy.port}", plan_deadline=10) as (worker, stub),
        ):
            _, decoding = await begin(stub, request(prompt(1, 10), policy="full", new=500))
            tokens, chunks, decoded = [], 0, []
            async for event in stub.Generate(message):
                tokens += event.delta.token_ids
                chunks += event.HasField("prefill")
                if not tokens and chunks:
                    decoded.append(metrics(worker)["scissorhands_worker_generated_tokens_total"])
            assert [event async for event in decoding][-1].HasField("finish")
    assert tokens == expected
    assert event.finish.cache.plans_manager > chunks / 2
    assert decoded[-1] - decoded[0] > 3 * chunks


async def test_a_manager_whose_plans_are_late_still_grants():
    with ManagerProcess() as manager:
        async with (
            DelayProxy(manager.port, 0.05) as proxy,
            tiny_worker(manager=f"127.0.0.1:{proxy.port}", plan_deadline=0.02) as (worker, stub),
        ):
            for seed in range(3):
                first, *_ = [event async for event in stub.Generate(request(prompt(seed), slots=30, new=1))]
                assert first.accepted.grant.source == budget_pb2.GRANT_SOURCE_MANAGER
            assert metrics(worker)["scissorhands_worker_plans_late_total"] >= 1


async def test_a_request_that_fails_before_it_reaches_the_engine_is_counted(monkeypatch):
    def fail(*arguments) -> None:
        raise RuntimeError("injected")

    async with tiny_worker() as (worker, stub):
        monkeypatch.setattr(service, "check", fail)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request(prompt(1), new=5)))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        found = metrics(worker)
    assert found['scissorhands_worker_requests_total{model_name="tiny",result="error"}'] == 1
