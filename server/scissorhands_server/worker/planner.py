"""Asking the manager for plans, from the engine's thread, without waiting."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable

import grpc

from scissorhands.errors import InvalidRequestError
from scissorhands.row import Row
from scissorhands.snapshot import Plan, Snapshot
from scissorhands.v1 import cache_manager_pb2
from scissorhands.wire import read_plan, snapshot_messages
from scissorhands_server.worker.link import ManagerLink


class RemotePlan:
    """A plan on its way from the manager."""

    def __init__(
        self, future: "concurrent.futures.Future[Plan | None]", link: ManagerLink, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._future = future
        self._link = link
        self._loop = loop
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
            self._link.metrics.plans_late.inc()
            if timeout:
                # Prefill has waited in vain; do not let it wait for every chunk.
                self._loop.call_soon_threadsafe(self._link.suspect)
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
        # Plans asked for before their chunks are read, by row.
        self._ahead: dict[str, RemotePlan] = {}

    def awaited(self, row: Row, snapshot: Callable[[], Snapshot], timeout: float) -> bool:
        """Ask for the plan of a row's next chunk, once, and tell whether it is on its way.

        Args:
            row: The row; it stays as it is until :meth:`submit` or :meth:`forget`.
            snapshot: Takes the snapshot that :meth:`submit` will be called with.
            timeout: How long to wait for it in all, in seconds.
        """
        plan = self._ahead.get(row.name) or self.submit(row, snapshot())
        if plan is None:
            return False
        self._ahead[row.name] = plan
        return plan.awaited(timeout)

    def forget(self, name: str) -> None:
        """Give up a plan that was asked for ahead of its chunk, by the name of its row."""
        plan = self._ahead.pop(name, None)
        if plan is not None:
            plan.cancel()

    def submit(self, row: Row, snapshot: Snapshot) -> RemotePlan | None:
        """Send a snapshot, at most one of each row at a time; None while the manager is away."""
        if row.name in self._ahead:
            return self._ahead.pop(row.name)
        session = self._link.session(row.name)
        if session is None or not self._link.up:
            return None
        asked = asyncio.run_coroutine_threadsafe(self._ask(session, snapshot), self._loop)
        return RemotePlan(asked, self._link, self._loop)

    async def _ask(self, session: cache_manager_pb2.SessionSpec, snapshot: Snapshot) -> Plan | None:
        began = time.monotonic()
        try:
            # A message a layer: the event loop breathes between them.
            messages = snapshot_messages(snapshot, session)
            response = await self._link.stub.PlanEviction(messages, timeout=self._link.deadline)
            plan = read_plan(response, snapshot)
        except grpc.aio.AioRpcError as error:
            self._link.failed(error)
            return None
        except InvalidRequestError:
            self._link.metrics.manager_errors.labels("other").inc()
            return None
        self._link.metrics.plan_latency.observe(time.monotonic() - began)
        return plan
