"""Who plans, how far away it is, and whether it dies cannot change a token or a kept slot."""

import asyncio
import random
import signal
from collections.abc import Callable

import pytest
from support.processes import ManagerProcess
from support.tiny_worker import metrics, request, tiny_worker

from benchmarks.delay_proxy import DelayProxy
from scissorhands.row import Eviction
from scissorhands_server.worker.answers import Answers
from scissorhands_server.worker.engine import Engine

JOBS = [("scissorhands", 40), ("h2o", 48), ("streaming", 32), ("scissorhands:paper", 36)]
NEW_TOKENS = 150
# What an eviction was: session's place in the list of jobs, epoch, step, and the positions evicted, layer by layer.
Evictions = dict[str, list[tuple[int, int, list[list[list[int]]]]]]


def prompt(seed: int) -> list[int]:
    return [random.Random(f"{seed}-{index}").randrange(3, 250) for index in range(120)]


@pytest.fixture
def recorded(monkeypatch) -> Evictions:
    """Record what every eviction of a test evicts, by policy."""
    record: Evictions = {}
    plain = Answers.evicted

    def evicted(told: Answers, task, eviction: Eviction | None) -> None:
        if eviction is not None:
            positions = [layer.positions.tolist() for layer in eviction.layers]
            record.setdefault(f"{task.grant.policy}:{task.grant.preset}", []).append(
                (eviction.epoch, eviction.step, positions)
            )
        plain(told, task, eviction)

    monkeypatch.setattr(Answers, "evicted", evicted)
    return record


async def answers(stub, disturb: Callable[[], None] | None = None) -> tuple[list[list[int]], list]:
    """Run all jobs together; ``disturb`` is called when the first has generated a third of its answer."""

    async def one(policy: str, slots: int, seed: int):
        call = stub.Generate(request(prompt(seed), slots=slots, policy=policy, new=NEW_TOKENS))
        tokens = []
        async for event in call:
            tokens += event.delta.token_ids
            if seed == 0 and disturb is not None and len(tokens) == NEW_TOKENS // 3 and event.delta.token_ids:
                disturb()
        return tokens, event.finish.cache

    results = await asyncio.gather(*(one(policy, slots, seed) for seed, (policy, slots) in enumerate(JOBS)))
    return [tokens for tokens, _ in results], [cache for _, cache in results]


async def alone(recorded: Evictions) -> tuple[list[list[int]], Evictions]:
    async with tiny_worker() as (_, stub):
        tokens, caches = await answers(stub)
    assert all(cache.plans_manager == 0 and cache.plans_local > 5 for cache in caches)
    evictions = dict(recorded)
    recorded.clear()
    return tokens, evictions


@pytest.mark.parametrize("delay", [0.0, 0.02])
async def test_manager_near_and_far(delay, recorded):
    expected = await alone(recorded)
    with ManagerProcess() as manager:
        async with (
            DelayProxy(manager.port, delay) as proxy,
            # On a busy machine, too, the plans of prefill must come in time.
            tiny_worker(manager=f"127.0.0.1:{proxy.port}", plan_deadline=20, manager_deadline=20) as (_, stub),
        ):
            tokens, caches = await answers(stub)
    assert (tokens, recorded) == expected
    # The tiny model decodes faster than any manager answers, so only prefill, which waits, must have its plans.
    assert all(cache.plans_manager >= 3 for cache in caches)


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_manager_lost_in_the_middle_and_found_again(fault, recorded):
    expected = await alone(recorded)
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):

            def disturb() -> None:
                if fault == "kill":
                    manager.kill()
                else:
                    manager.send(signal.SIGSTOP)

            tokens, caches = await answers(stub, disturb)
            assert (tokens, recorded) == expected
            assert all(cache.plans_manager >= 1 and cache.plans_local >= 1 for cache in caches)
            recorded.clear()
            tokens, caches = await answers(stub)
            assert (tokens, recorded) == expected
            assert all(cache.plans_manager == 0 for cache in caches)
            recorded.clear()
            if fault == "kill":
                manager.restart()
            else:
                manager.send(signal.SIGCONT)
            await found_again(worker)
            # A manager that goes on after a stop first has what was asked of it before.
            for _ in range(10):
                tokens, caches = await answers(stub)
                assert (tokens, recorded) == expected
                recorded.clear()
                if all(cache.plans_manager >= 3 for cache in caches):
                    return
            pytest.fail("the manager was found, but makes no plans in time")


async def found_again(worker) -> None:
    for _ in range(200):
        if metrics(worker)["scissorhands_worker_manager_up"] == 1:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the worker did not find the manager again")


async def test_decoding_takes_the_plans_of_a_manager_that_is_quick_enough(recorded, monkeypatch):
    """Slow the engine to the pace of a real model: then plans come in time, and change nothing either."""
    expected = await alone(recorded)
    decode = Engine._decode

    def slowly(engine: Engine) -> None:
        decode(engine)
        engine._work.acquire()
        engine._work.wait(0.02)
        engine._work.release()

    monkeypatch.setattr(Engine, "_decode", slowly)
    with ManagerProcess() as manager:
        async with tiny_worker(manager=manager.address) as (worker, stub):
            tokens, caches = await answers(stub)
            found = metrics(worker)
    assert (tokens, recorded) == expected
    assert found['scissorhands_worker_plans_total{phase="decode",source="manager"}'] >= 10
    planned_here = sum(cache.plans_local for cache in caches)
    assert found['scissorhands_worker_plans_total{phase="decode",source="local"}'] <= planned_here
