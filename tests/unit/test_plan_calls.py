"""How a worker asks for plans: together, a few calls at a time, and not of a manager that has no room."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from scissorhands.plan_wire import MOST_SNAPSHOTS, plan_message, read_plan
from scissorhands.snapshot import LayerEvidence, Plan, Snapshot
from scissorhands.v1 import cache_manager_pb2 as pb
from scissorhands.v1 import plan_pb2
from scissorhands_server.worker.plan_calls import MOST_CALLS, PlanCalls

PATIENCE = 30
NO_ROOM = grpc.StatusCode.RESOURCE_EXHAUSTED


class Manager:
    """Stands for the link and the stub; answers with ``answer`` once it is let go."""

    def __init__(self):
        self.calls, self.cancelled, self.failures, self.errors = [], 0, [], Counter()
        self.go = asyncio.Event()
        self.answer = self.keep_all
        self.deadline = PATIENCE
        self.stub = SimpleNamespace(PlanEvictions=self.plan_evictions)
        self.metrics = SimpleNamespace(manager_errors=SimpleNamespace(labels=self._labels))

    def _labels(self, reason):
        return SimpleNamespace(inc=lambda: self.errors.update([reason]))

    def failed(self, error):
        self.failures.append(error.code())

    async def plan_evictions(self, requests, timeout):
        headers = [part.header for request in requests for part in request.parts if part.HasField("header")]
        self.calls.append([header.step for header in headers])
        try:
            await asyncio.wait_for(self.go.wait(), timeout)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return pb.PlanEvictionsResponse(results=[self.answer(header) for header in headers])

    @staticmethod
    def keep_all(header):
        return plan_pb2.PlanResult(
            plan=plan_message(Plan(header.epoch, header.step, (np.ones((1, 4), dtype=np.bool_),)))
        )


def snapshot(step):
    return Snapshot(0, step, 0, 1, (LayerEvidence(np.arange(4).reshape(1, 4), {"mass": np.ones((1, 4))}),))


def ask(calls, count, first=10):
    return [asyncio.create_task(calls.ask(pb.SessionSpec(), snapshot(first + index))) for index in range(count)]


async def all_of(tasks):
    return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def test_snapshots_of_a_step_travel_together_and_each_gets_its_plan():
    manager = Manager()
    manager.go.set()
    plans = await all_of(ask(PlanCalls(manager), MOST_SNAPSHOTS + 2))
    assert [plan.step for plan in plans] == list(range(10, 12 + MOST_SNAPSHOTS))
    assert [len(call) for call in manager.calls] == [MOST_SNAPSHOTS, 2]


async def test_a_slow_manager_gets_fuller_calls_and_not_more():
    manager = Manager()
    calls = PlanCalls(manager)
    tasks = []
    for index in range(MOST_CALLS):
        tasks += ask(calls, 1, first=10 + index)
        await until(lambda index=index: len(manager.calls) == index + 1)
    tasks += ask(calls, 5, first=100)
    await asyncio.sleep(0.01)
    assert len(manager.calls) == MOST_CALLS
    manager.go.set()
    assert all(await all_of(tasks))
    assert [len(call) for call in manager.calls] == [1] * MOST_CALLS + [5]


async def test_a_failure_is_of_one_snapshot_alone():
    manager = Manager()
    manager.go.set()
    bad = plan_pb2.PlanResult(
        failure=plan_pb2.PlanFailure(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message="no")
    )
    manager.answer = lambda header: bad if header.step == 11 else Manager.keep_all(header)
    calls = PlanCalls(manager)
    plans = await all_of(ask(calls, 3))
    assert [plan is None for plan in plans] == [False, True, False]
    assert manager.errors == {"refused": 1}
    assert not calls.resting


async def test_an_answer_that_is_too_short_or_of_another_snapshot_is_no_plan():
    manager = Manager()
    manager.go.set()
    manager.answer = lambda header: Manager.keep_all(pb.SnapshotHeader(step=header.step + 1))
    assert await all_of(ask(PlanCalls(manager), 1)) == [None]
    assert manager.errors == {"other": 1}


async def test_a_manager_without_room_is_left_alone_for_a_while():
    manager = Manager()
    manager.go.set()
    calls = PlanCalls(manager)
    full = plan_pb2.PlanResult(failure=plan_pb2.PlanFailure(code=NO_ROOM.value[0]))
    manager.answer = lambda header: full if header.step == 11 else Manager.keep_all(header)
    assert [plan is None for plan in await all_of(ask(calls, 2))] == [False, True]
    assert calls.resting

    def refuse(header):
        raise grpc.aio.AioRpcError(NO_ROOM, grpc.aio.Metadata(), grpc.aio.Metadata())

    calls = PlanCalls(manager)
    manager.answer = refuse
    assert await all_of(ask(calls, 2)) == [None, None]
    assert manager.failures == [NO_ROOM]
    assert calls.resting


async def test_a_call_is_given_up_when_the_last_snapshot_of_it_is():
    manager = Manager()
    calls = PlanCalls(manager)
    tasks = ask(calls, 2)
    await until(lambda: manager.calls)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert manager.cancelled == 0
    tasks[1].cancel()
    await until(lambda: manager.cancelled == 1)
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    manager.go.set()
    (plan,) = await all_of(ask(calls, 1))
    assert read_plan(plan_message(plan), snapshot(10)).step == 10
