"""Asking the manager for plans, from the engine's thread, without waiting."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable

from scissorhands.row import Row
from scissorhands.snapshot import Plan, Snapshot
from scissorhands.v1 import cache_manager_pb2
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.plan_calls import PlanCalls

# How long prefill asks for no plan after it has waited for one in vain, in seconds.
REST_SECONDS = 0.5


class RemotePlan:
    """A plan on its way from the manager.

    Args:
        future: The plan.
        late: Called if it is given up, with whether somebody waited for it.
    """

    def __init__(self, future: "concurrent.futures.Future[Plan | None]", late: Callable[[bool], None]) -> None:
        self._future = future
        self._late = late
        self._asked = time.monotonic()

    def awaited(self, timeout: float) -> bool:
        """Whether the plan has not come yet, but may within ``timeout`` seconds of having been asked for."""
        return not self._future.done() and time.monotonic() < self._asked + timeout

    def cancel(self) -> None:
        """Give it up."""
        self._future.cancel()

    def take(self, timeout: float) -> Plan | None:
        """Return the plan if it comes within ``timeout`` seconds of having been asked for; None if not."""
        try:
            return self._future.result(max(0.0, self._asked + timeout - time.monotonic()))
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            self._future.cancel()
            self._late(timeout > 0)
            return None


class RemotePlanner:
    """Sends snapshots to the manager.

    Args:
        link: The link to the manager.
        loop: The event loop on which the link lives.
    """

    def __init__(self, link: ManagerLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._calls = PlanCalls(link)
        # Plans asked for before their chunks are read, by row.
        self._ahead: dict[str, RemotePlan] = {}
        self._rest_until = 0.0

    def awaited(self, row: Row, snapshot: Callable[[], Snapshot], timeout: float) -> bool:
        """Ask for the plan of a row's next chunk, once, and tell whether it is on its way.

        Args:
            row: The row; it stays as it is until :meth:`submit` or :meth:`forget`.
            snapshot: Takes the snapshot that :meth:`submit` will be called with.
            timeout: How long to wait for it in all, in seconds.
        """
        if row.name not in self._ahead:
            if self._session(row) is None:
                return False
            plan = self.submit(row, snapshot())
            if plan is None:
                return False
            self._ahead[row.name] = plan
        return self._ahead[row.name].awaited(timeout)

    def forget(self, name: str) -> None:
        """Give up a plan that was asked for ahead of its chunk, by the name of its row."""
        plan = self._ahead.pop(name, None)
        if plan is not None:
            plan.cancel()

    def submit(self, row: Row, snapshot: Snapshot) -> RemotePlan | None:
        """Send a snapshot, at most one of each row at a time; None while the manager is away."""
        if row.name in self._ahead:
            return self._ahead.pop(row.name)
        session = self._session(row)
        if session is None:
            return None
        asked = asyncio.run_coroutine_threadsafe(self._ask(session, snapshot), self._loop)
        return RemotePlan(asked, self._gave_up)

    def _session(self, row: Row) -> cache_manager_pb2.SessionSpec | None:
        """Return a row's session; None while nobody can be asked."""
        if not self._link.up or self._calls.resting or time.monotonic() < self._rest_until:
            return None
        return self._link.session(row.name)

    def _gave_up(self, waited: bool) -> None:
        self._link.metrics.plans_late.inc()
        if waited:
            # Do not let prefill wait for every chunk. The manager may be well and only slow: its health tells.
            self._rest_until = time.monotonic() + REST_SECONDS

    async def _ask(self, session: cache_manager_pb2.SessionSpec, snapshot: Snapshot) -> Plan | None:
        began = time.monotonic()
        plan = await self._calls.ask(session, snapshot)
        if plan is not None:
            self._link.metrics.plan_latency.observe(time.monotonic() - began)
        return plan
