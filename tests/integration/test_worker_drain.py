"""A worker that is asked to stop: answers may end, and those of sessions that do not go on elsewhere."""

import asyncio
import os
import signal

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from support.conversations import FIRST, THIRD, ask, results, workers
from support.speaker import Speaker
from support.tiny_models import random_tokens
from support.tiny_worker import metrics, request, tiny_loaded
from support.waiting import until
from support.worker_process import worker_process

from scissorhands.v1 import generation_pb2_grpc
from scissorhands_server.hosting import StopSignals
from scissorhands_server.worker.engine import Engine

LONG = 120
FULL = {"policy": "full"}
KEPT = {**FULL, "session_id": "c1"}


@pytest.fixture
def pace(monkeypatch):
    """Slow the engine to the pace of a real model, so that answers last for seconds."""
    turn = Engine._turn

    def slowly(engine):
        turn(engine)
        engine._work.acquire()
        engine._work.wait(0.01)
        engine._work.release()

    monkeypatch.setattr(Engine, "_turn", slowly)


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url)


def ask_to_stop(worker, grace, times=1):
    """Send this process what an operator sends a worker's; return what stops the worker."""
    signals = StopSignals()
    stopping = asyncio.create_task(signals.run(worker.host, grace, worker.drain))
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
    return stopping


async def broken_off(events):
    """Return the tokens of an answer that breaks off, and what its client is told."""
    tokens = []

    async def read():
        async for event in events:
            tokens.extend(event.delta.token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in rpc_status.from_call(caught.value).details)
    assert info.reason == "STOPPING"
    return tokens, info.metadata["session_id"]


async def begun(stub, prompt, new=LONG, **more):
    """Begin an answer; return the rest of its events once its first token has come."""
    events = aiter(stub.Generate(request(prompt, new=new, **more), timeout=60))
    while not (await anext(events)).delta.token_ids:
        pass
    return events


@pytest.mark.parametrize(("policy", "slots"), [("full", 0), ("h2o", 40)])
async def test_an_answer_that_is_not_done_in_time_goes_on_elsewhere(manager, pace, policy, slots):
    options = {"policy": policy, "slots": slots, "session_id": "c1"}
    async with workers(manager) as ((one, first), (two, second)):
        events = aiter(first.Generate(request(FIRST, new=LONG, **options), timeout=60))
        tokens = []
        while len(tokens) < 5:
            tokens += (await anext(events)).delta.token_ids
        stopping = ask_to_stop(one, 0.2)
        more, kept = await broken_off(events)
        tokens += more
        await stopping
        assert kept == "c1"
        assert 5 <= len(tokens) < LONG
        assert results(one, "suspends") == {"suspended": 1}
        accepted, rest, _ = await ask(second, [*FIRST, *tokens], new=LONG - len(tokens), **options)
        assert accepted.resumed_tokens == len(FIRST) + len(tokens) - 1
        assert metrics(two)["scissorhands_worker_resumed_tokens_total"] == accepted.resumed_tokens
        if policy == "full":
            # Word for word what it would have been.
            expected = (await ask(second, FIRST, new=LONG, policy="full"))[1]
        else:
            # That of a row that stayed in memory, and that a turn begins with in the same place.
            speaker, expected = Speaker(tiny_loaded().model, policy), list(FIRST)
            row = speaker.cache.add_row(speaker.grant)
            for new in (len(tokens), len(rest)):
                speaker.turn(row, expected, new)
            assert row.epoch > 3
            expected = expected[len(FIRST) :]
        assert tokens + rest == expected


async def test_a_prompt_that_is_not_read_yet_is_read_on_elsewhere(manager, pace):
    prompt = random_tokens(400, seed=9).tolist()
    asked = {"policy": "h2o", "slots": 40, "no_prefix_cache": True}
    async with workers(manager) as ((one, first), (_, second)):
        _, expected, _ = await ask(second, prompt, **asked)
        events = aiter(first.Generate(request(prompt, session_id="c1", **asked), timeout=60))
        while not (event := await anext(events)).prefill.done:
            pass
        assert event.prefill.done < 200
        stopping = ask_to_stop(one, 0)
        tokens, kept = await broken_off(events)
        await stopping
        assert (tokens, kept) == ([], "c1")
        accepted, found, _ = await ask(second, prompt, session_id="c1", **asked)
        assert event.prefill.done <= accepted.resumed_tokens < len(prompt)
        assert found == expected


async def test_answers_end_in_their_time_and_new_ones_are_refused(manager, pace):
    async with workers(manager) as ((one, first), _):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{one.port}")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        events = await begun(first, FIRST, new=20, **KEPT)
        stopping = ask_to_stop(one, 60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(first, FIRST, **FULL)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        tokens = [token async for event in events for token in event.delta.token_ids]
        await stopping
        assert len(tokens) == 19
        assert results(one, "suspends") == {"suspended": 1}
        await channel.close()


async def test_of_whoever_keeps_nothing_nothing_is_kept(manager, pace, redis_server):
    async with workers(manager, rows=2) as ((one, first), (two, second)):
        _, earlier, _ = await ask(first, FIRST, **KEPT)
        ids = [*FIRST, *earlier, *THIRD]
        nobody = await begun(first, FIRST, **FULL)
        running = await begun(first, FIRST, **FULL | {"session_id": "c2"})
        # It waits in the queue; what it goes on from stays as it is.
        waiting = aiter(first.Generate(request(ids, new=LONG, **KEPT), timeout=60))
        assert (await anext(waiting)).accepted.resumed_tokens
        # The second signal ends the grace.
        stopping = ask_to_stop(one, 60, times=2)
        for events, expected in ((nobody, ""), (running, "c2"), (waiting, "")):
            assert (await broken_off(events))[1] == expected
        await stopping
        assert results(one, "suspends") == {"suspended": 2}
        accepted, _, _ = await ask(second, ids, **KEPT)
        assert accepted.resumed_tokens == len(FIRST) + len(earlier) - 1
        held = "scissorhands_worker_suspension_held_bytes"
        assert metrics(one)[held] == metrics(two)[held] == 0


async def test_without_a_store_it_stops_all_the_same(manager, pace, redis_server):
    async with workers(manager, suspend_deadline=1) as ((one, first), (_, second)):
        events = await begun(first, FIRST, **KEPT)
        redis_server.pause()
        stopping = ask_to_stop(one, 0)
        _, kept = await broken_off(events)
        await stopping
        assert kept == ""
        assert set(results(one, "suspends")) <= {"late", "store_unavailable"}
        redis_server.resume()
        await until(lambda: manager.metric("store_up") == 1, "the store")
        accepted, _, _ = await ask(second, FIRST, **FULL | {"session_id": "c3"})
        assert accepted.session_id == "c3"


async def test_a_process_that_is_asked_to_stop_ends_in_order(manager, tmp_path):
    options = ("--manager", manager.address, "--grace", "0")
    async with workers(manager, 1) as ((_, stub),):
        with worker_process(tmp_path / "worker.log", *options) as (process, address):
            async with grpc.aio.insecure_channel(address) as channel:
                doomed = generation_pb2_grpc.GenerationServiceStub(channel)
                calls = [
                    doomed.Generate(request(FIRST, new=400, **FULL, session_id=f"s{number}"), timeout=60)
                    for number in range(4)
                ]
                streams = [aiter(call) for call in calls]
                for events in streams:
                    await anext(events)
                process.send_signal(signal.SIGTERM)
                for number, events in enumerate(streams):
                    tokens, kept = await broken_off(events)
                    if kept:
                        accepted, _, _ = await ask(stub, [*FIRST, *tokens, *THIRD], session_id=f"s{number}", **FULL)
                        assert accepted.resumed_tokens
            assert await asyncio.to_thread(process.wait, 30) == 0
