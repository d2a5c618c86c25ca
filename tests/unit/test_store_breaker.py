"""The circuit breaker and the deadline, around a store that does what it is told."""

import asyncio

import pytest

from scissorhands.errors import StoreUnavailableError
from scissorhands_server.store.breaker import BreakerStore
from scissorhands_server.store.deadline import DeadlineStore
from scissorhands_server.store.decorator import METHODS, StoreDecorator


class Scripted(StoreDecorator):
    """A store that answers, fails, or waits until it is let go."""

    def __init__(self):
        super().__init__(None)
        self.calls = 0
        self.failure = None
        self.gate = None

    async def guard(self, method, call):
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise StoreUnavailableError(method, self.failure)
        return method

    async def ping(self):
        return await self.guard("ping", None)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def inner():
    return Scripted()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(inner, clock):
    return BreakerStore(inner, threshold=2, cooldown=5, clock=clock)


async def fail(store):
    with pytest.raises(StoreUnavailableError) as caught:
        await store.ping()
    return caught.value.reason


async def test_it_opens_after_failures_in_a_row_and_then_asks_nobody(breaker, inner):
    inner.failure = "timeout"
    assert await fail(breaker) == "timeout"
    inner.failure = None
    await breaker.ping()
    inner.failure = "unreachable"
    assert await fail(breaker) == "unreachable"
    assert not breaker.is_open
    assert await fail(breaker) == "unreachable"
    assert breaker.is_open
    assert inner.calls == 4
    assert [await fail(breaker) for _ in range(3)] == ["open"] * 3
    assert inner.calls == 4


async def test_a_refusal_is_an_answer(breaker, inner):
    inner.failure = "refused"
    assert [await fail(breaker) for _ in range(5)] == ["refused"] * 5
    assert not breaker.is_open


async def test_a_probe_that_succeeds_closes_it(breaker, inner, clock):
    inner.failure = "timeout"
    await fail(breaker)
    await fail(breaker)
    clock.now += 5
    inner.failure = None
    await breaker.ping()
    assert not breaker.is_open


async def test_a_probe_that_fails_starts_the_cooldown_again(breaker, inner, clock):
    inner.failure = "timeout"
    await fail(breaker)
    await fail(breaker)
    clock.now += 5
    assert await fail(breaker) == "timeout"
    assert await fail(breaker) == "open"
    clock.now += 4.9
    assert await fail(breaker) == "open"
    clock.now += 0.1
    assert await fail(breaker) == "timeout"


async def test_only_one_call_probes_and_the_others_do_not_wait(breaker, inner, clock):
    inner.failure = "timeout"
    await fail(breaker)
    await fail(breaker)
    clock.now += 5
    inner.failure = None
    inner.gate = asyncio.Event()
    probe = asyncio.create_task(breaker.ping())
    await asyncio.sleep(0)
    assert [await fail(breaker) for _ in range(3)] == ["open"] * 3
    inner.gate.set()
    await probe
    assert not breaker.is_open


async def test_a_cancelled_probe_lets_the_next_one_probe(breaker, inner, clock):
    inner.failure = "timeout"
    await fail(breaker)
    await fail(breaker)
    clock.now += 5
    inner.gate = asyncio.Event()
    probe = asyncio.create_task(breaker.ping())
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    inner.gate, inner.failure = None, None
    await breaker.ping()
    assert not breaker.is_open


async def test_a_call_that_takes_too_long_is_a_timeout(inner):
    inner.gate = asyncio.Event()
    store = DeadlineStore(inner, 0.01)
    assert await fail(store) == "timeout"


async def test_every_method_passes_the_guard():
    class Recorder(StoreDecorator):
        def __init__(self, inner):
            super().__init__(inner)
            self.seen = []

        async def guard(self, method, call):
            self.seen.append(method)

    recorder = Recorder(Scripted())
    await recorder.ping()
    await recorder.put("o", "p", b"d", 1)
    await recorder.commit("o", ["p"], 1)
    await recorder.compare_and_set("o", "p", None, b"d", 1)
    await recorder.get("o", "p")
    await recorder.get_range("o", "p", 0, 1)
    await recorder.delete("o", ["p"])
    await recorder.list_pages("o")
    await recorder.stat("o", "p")
    await recorder.time_left("o", "p")
    await recorder.run("o", "return 1", ["p"], [])
    await recorder.scan("")
    await recorder.info()
    assert tuple(recorder.seen) == METHODS
