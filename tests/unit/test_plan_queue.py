"""The queue of plans: who is let in, who comes next, and who frees what."""

import asyncio
import threading

import pytest

from scissorhands.errors import CapacityError
from scissorhands_server.manager.plan_queue import PlanGate, PlanQueue

PATIENCE = 30


@pytest.fixture
def shed():
    return []


def gate(shed, **changes):
    return PlanGate(**{"most": 3, "most_bytes": 100, "most_wait": 1.0, "threads": 1, "shed": shed.append, **changes})


def test_what_waits_for_too_long_is_turned_away_and_an_idle_gate_is_open(shed):
    it = gate(shed)
    it.took(10, 5.0)
    ticket = it.admit(10)
    with pytest.raises(CapacityError, match="5 s, above the 1 s of max_plan_wait") as caught:
        it.admit(1)
    assert (caught.value.retry_after, shed) == (4.0, ["wait"])
    ticket.release()
    # However slow plans were, somebody must be let in to find out whether they still are.
    it.admit(10)


def test_more_threads_wait_for_less(shed):
    it = gate(shed, threads=10)
    it.took(10, 5.0)
    it.admit(10)
    assert it.expected_wait == pytest.approx(0.5)
    it.admit(1)
    assert shed == []


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (90, 11)])
def test_bounds_turn_away(shed, sizes):
    it = gate(shed)
    for size in sizes[:-1]:
        it.admit(size)
    with pytest.raises(CapacityError):
        it.admit(sizes[-1])
    assert shed == ["bound"]


def test_the_pace_follows_what_plans_take(shed):
    it = gate(shed)
    it.took(10, 10.0)
    for _ in range(200):
        it.took(10, 0.1)
    it.admit(10)
    assert it.expected_wait == pytest.approx(0.1, rel=0.01)


class Held:
    """A queue of one thread that works in order, once it is let go."""

    def __init__(self):
        self.go, self.started, self.order = threading.Event(), threading.Event(), []
        self.queue = PlanQueue(self.compute, 1)

    def compute(self, job):
        self.started.set()
        assert self.go.wait(PATIENCE)
        self.order.append(job)
        return job


@pytest.fixture
def held():
    it = Held()
    yield it
    it.go.set()
    it.queue.close()


async def begun(held, key, *jobs, tickets=()):
    """Let somebody ask, and return when that has arrived."""
    task = asyncio.create_task(held.queue.run(key, jobs, tickets))
    await asyncio.sleep(0)
    return task


async def test_callers_take_turns_whatever_one_of_them_asks_for(held):
    first = await begun(held, "greedy", "g0")
    assert await asyncio.to_thread(held.started.wait, PATIENCE)
    greedy = [await begun(held, "greedy", f"g{index}") for index in (1, 2, 3)]
    modest = await begun(held, "modest", "m1", "m2")
    assert not held.queue.idle
    held.go.set()
    await asyncio.wait_for(asyncio.gather(first, *greedy, modest), PATIENCE)
    assert held.order == ["g0", "g1", "m1", "m2", "g2", "g3"]
    assert held.queue.idle


async def test_who_leaves_the_queue_frees_its_place_and_who_is_computed_when_it_is_done(shed, held):
    it = gate(shed, most=2)
    running, waiting = it.admit(1), it.admit(1)
    first = await begun(held, "w", "running", tickets=[running])
    assert await asyncio.to_thread(held.started.wait, PATIENCE)
    second = await begun(held, "w", "waiting", tickets=[waiting])
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert held.queue.idle
    it.admit(1)
    with pytest.raises(CapacityError):
        it.admit(1)
    held.go.set()
    assert await asyncio.wait_for(held.queue.run("w", ["last"], []), PATIENCE) == ["last"]
    assert held.order == ["running", "last"]
    it.admit(1)
