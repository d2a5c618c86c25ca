"""Planning: snapshots come in, plans go out, off the event loop and within bounds."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scissorhands.budget import Grant
from scissorhands.demand import Surprises, surprise
from scissorhands.errors import CapacityError, InvalidRequestError
from scissorhands.importance import Attention, Tally, attention, by_layer, persistence, tally
from scissorhands.ledger import Ledger, SessionRecord, SessionState
from scissorhands.plan import plan
from scissorhands.policies import get_policy
from scissorhands.snapshot import Snapshot
from scissorhands.v1 import cache_manager_pb2
from scissorhands.wire import model_shape, plan_message
from scissorhands_server.manager.admission import Admission, Ticket
from scissorhands_server.manager.checks import check_granted
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.sessions import Sessions
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.snapshots import (
    ReceivedSnapshot,
    check_header,
    checked_snapshot,
    evidence_bytes,
    receive_header,
    receive_layers,
)
from scissorhands_server.manager.stream import MessageStream

RETRY_AFTER_SECONDS = 0.1


@dataclass(frozen=True)
class Computed:
    """What one computation gives: the answer, and what the ledger wants to know."""

    response: cache_manager_pb2.PlanEvictionResponse
    seconds: float
    tally: Tally
    snapshot: Snapshot


class Planning:
    """Plans evictions.

    A plan follows from the grant and the snapshot that the call carries, never from the ledger, so any replica, and a
    manager that has just been restarted, gives the same.

    Args:
        sessions: Where the sessions of calls are recalled.
        ledger: Where plans are recorded.
        settings: Limits.
        metrics: The manager's metrics.
    """

    def __init__(self, sessions: Sessions, ledger: Ledger, settings: ManagerSettings, metrics: ManagerMetrics) -> None:
        self._sessions = sessions
        self._ledger = ledger
        self._settings = settings
        self._metrics = metrics
        self._admission = Admission("plans", settings.max_plans, settings.plan_memory_bytes, RETRY_AFTER_SECONDS)
        self._pool = ThreadPoolExecutor(settings.plan_threads, thread_name_prefix="plan")
        self._measuring: set[asyncio.Task[None]] = set()

    async def plan(
        self, messages: AsyncIterator[cache_manager_pb2.PlanEvictionRequest]
    ) -> cache_manager_pb2.PlanEvictionResponse:
        """Receive a snapshot and return its plan.

        Raises:
            InvalidRequestError: A part is malformed.
            CapacityError: Too many plans are in progress.
        """
        result = "failed"
        try:
            response = await self._plan(messages)
            result = "computed"
        except InvalidRequestError:
            result = "refused"
            raise
        except CapacityError:
            result = "shed"
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        else:
            return response
        finally:
            self._metrics.plans.labels(result).inc()

    async def close(self) -> None:
        """Stop measuring and end the threads."""
        for task in self._measuring:
            task.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _plan(
        self, messages: AsyncIterator[cache_manager_pb2.PlanEvictionRequest]
    ) -> cache_manager_pb2.PlanEvictionResponse:
        requests = MessageStream(messages, self._settings.stream_timeout)
        async with requests.heard_out():
            header = await receive_header(requests)
            grant = check_granted(header.session, self._settings)
            ticket = self._admission.admit(check_header(header, grant, self._settings))
            try:
                record = self._sessions.recall(header.session)
                received = await receive_layers(requests, header, grant)
                self._metrics.snapshot_bytes.inc(evidence_bytes(received))
            except BaseException:
                ticket.release()
                raise
        computed = await self._compute(received, grant, record.tally if record else None, ticket)
        self._metrics.plan_compute.observe(computed.seconds)
        if record is not None:
            self._record(record, computed)
        return computed.response

    async def _compute(
        self, received: ReceivedSnapshot, grant: Grant, before: Tally | None, ticket: Ticket
    ) -> Computed:
        """Compute in a thread. A thread cannot be stopped: the memory is free when it is done, whoever has left."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, _compute, received, grant, before)

        def done(ended: asyncio.Future[Computed]) -> None:
            ticket.release()
            if not ended.cancelled():
                ended.exception()  # Looked at, so that nobody is told of it when the caller has left.

        future.add_done_callback(done)
        return await asyncio.shield(future)

    def _record(self, record: SessionRecord, computed: Computed) -> None:
        """Tell the ledger, and measure persistence in the background if a thread is free for it."""
        if record.state is not SessionState.OPEN or not self._ledger.evicted(record, computed.tally):
            return
        if len(self._measuring) < self._settings.plan_threads:
            task = asyncio.create_task(self._measure(record, computed.snapshot))
            self._measuring.add(task)
            task.add_done_callback(self._measuring.discard)

    async def _measure(self, record: SessionRecord, snapshot: Snapshot) -> None:
        loop = asyncio.get_running_loop()
        after = await loop.run_in_executor(self._pool, attention, snapshot)
        before = self._ledger.remember(record, after)
        if before is not None:
            overlaps, surprises = await loop.run_in_executor(self._pool, _compared, before, after)
            spec = record.spec
            self._ledger.persisted(record, by_layer(overlaps, spec.model.kv_heads if spec.grant.by_head else 1))
            # Those of other policies would not get the budgets, and hold other slots.
            if surprises is not None and get_policy(spec.grant.policy, spec.grant.preset).shares_by_loss:
                model = spec.model
                self._ledger.demands.learn(model.fingerprint, model.name, model_shape(model), surprises)
                self._metrics.compared_snapshots.inc()


def _compared(before: Attention, after: Attention) -> tuple[tuple[float, ...], Surprises | None]:
    return persistence(before, after), surprise(before, after)


def _compute(received: ReceivedSnapshot, grant: Grant, before: Tally | None) -> Computed:
    began = time.perf_counter()
    snapshot = checked_snapshot(received)
    planned = plan(grant, snapshot)
    response = plan_message(planned)
    seconds = time.perf_counter() - began
    response.compute_time.FromNanoseconds(round(seconds * 1e9))
    return Computed(response, seconds, tally(snapshot, planned, before), snapshot)
