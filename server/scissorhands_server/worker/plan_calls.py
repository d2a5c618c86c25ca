"""Calls for plans: the snapshots that rows send at about the same time travel together."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import grpc

from scissorhands.errors import InvalidRequestError
from scissorhands.plan_wire import MOST_SNAPSHOTS, plan_requests, read_plan
from scissorhands.snapshot import Plan, Snapshot
from scissorhands.v1 import cache_manager_pb2, plan_pb2
from scissorhands_server.worker.link import ManagerLink

# How long a snapshot waits for others of the same step, in seconds.
GATHER_SECONDS = 0.002
# Calls in progress at once: a manager that is slow gets fuller calls, not more of them.
MOST_CALLS = 4
# Slots of one call, unless it is a single snapshot. A plan has a bit a slot, and an answer may hold 4 MiB.
MOST_SLOTS = 2 << 20
# How long nothing is asked of a manager that had no room, in seconds.
BACK_OFF_SECONDS = 0.5


@dataclass(frozen=True)
class _Asked:
    snapshot: Snapshot
    session: cache_manager_pb2.SessionSpec
    plan: "asyncio.Future[Plan | None]"

    @property
    def slots(self) -> int:
        return sum(layer.positions.size for layer in self.snapshot.layers)


class PlanCalls:
    """Asks for the plans of snapshots, of several in one call. Lives on the event loop.

    What waits is bounded by the rows: each has one snapshot in flight.

    Args:
        link: The link to the manager.
    """

    def __init__(self, link: ManagerLink) -> None:
        self._link = link
        self._waiting: deque[_Asked] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._gathering: asyncio.TimerHandle | None = None
        self._rest_until = 0.0

    @property
    def resting(self) -> bool:
        """Whether the manager had no room a moment ago; may be read from any thread."""
        return time.monotonic() < self._rest_until

    async def ask(self, session: cache_manager_pb2.SessionSpec, snapshot: Snapshot) -> Plan | None:
        """Return the plan of a snapshot; None if the manager gives none. Cancel it to give it up."""
        asked = _Asked(snapshot, session, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if len(self._waiting) >= MOST_SNAPSHOTS:
            self._send()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send)
        return await asked.plan

    def _send(self) -> None:
        """Begin calls for what waits, as many as may be in progress."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        while len(self._calls) < MOST_CALLS and (together := self._take()):
            call = asyncio.create_task(self._call(together))
            self._calls.add(call)
            call.add_done_callback(self._ended)
            for asked in together:
                asked.plan.add_done_callback(partial(_cancel_if_settled, call, together))

    def _ended(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._send()

    def _take(self) -> list[_Asked]:
        """Take what goes into one call, without what has been given up."""
        together: list[_Asked] = []
        slots = 0
        while self._waiting and len(together) < MOST_SNAPSHOTS:
            if self._waiting[0].plan.done():
                self._waiting.popleft()
                continue
            slots += self._waiting[0].slots
            if together and slots > MOST_SLOTS:
                break
            together.append(self._waiting.popleft())
        return together

    async def _call(self, together: list[_Asked]) -> None:
        """Make one call, and settle all that wait for it, however it ends."""
        try:
            requests = plan_requests((asked.snapshot, asked.session) for asked in together)
            response = await self._link.stub.PlanEvictions(requests, timeout=self._link.deadline)
        except grpc.aio.AioRpcError as error:
            self._link.failed(error)
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._back_off()
        else:
            for asked, result in zip(together, response.results, strict=False):
                self._settle(asked, result)
        finally:
            for asked in together:
                if not asked.plan.done():
                    asked.plan.set_result(None)

    def _settle(self, asked: _Asked, result: plan_pb2.PlanResult) -> None:
        if asked.plan.done():
            return
        try:
            if result.WhichOneof("result") != "plan":
                full = result.failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                self._link.metrics.manager_errors.labels("refused").inc()
                if full:
                    self._back_off()
                return
            asked.plan.set_result(read_plan(result.plan, asked.snapshot))
        except InvalidRequestError:
            self._link.metrics.manager_errors.labels("other").inc()

    def _back_off(self) -> None:
        self._rest_until = time.monotonic() + BACK_OFF_SECONDS


def _cancel_if_settled(call: "asyncio.Task[None]", together: list[_Asked], _: "asyncio.Future[Plan | None]") -> None:
    """Give the place at the manager back of a call that nobody waits for any more."""
    if all(asked.plan.done() for asked in together):
        call.cancel()
