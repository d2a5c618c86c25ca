"""Planning: snapshots come in, plans go out, off the event loop and within bounds."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from scissorhands.demand import Surprises, surprise
from scissorhands.errors import CapacityError, InvalidRequestError, ScissorhandsError
from scissorhands.importance import Attention, Tally, attention, by_layer, persistence, tally
from scissorhands.ledger import Ledger, SessionRecord, SessionState
from scissorhands.plan import plan
from scissorhands.plan_wire import plan_message
from scissorhands.policies import get_policy
from scissorhands.snapshot import Snapshot
from scissorhands.v1 import cache_manager_pb2, plan_pb2
from scissorhands.wire import model_shape
from scissorhands_server.manager.admission import Ticket
from scissorhands_server.manager.checks import check_granted
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.plan_queue import RETRY_AFTER_SECONDS, PlanGate, PlanQueue
from scissorhands_server.manager.sessions import Sessions
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.snapshots import ReceivedSnapshot, SnapshotStream, check_header, checked_snapshot
from scissorhands_server.manager.stream import MessageStream
from scissorhands_server.status import status_message

# The share of the time that measuring importance may take, and how far ahead of it measuring may be, in seconds.
_MEASURING_SHARE = 0.1
_MEASURING_AHEAD = 2.0


@dataclass(frozen=True)
class Job:
    """A snapshot to plan for: as it came, and what the ledger knew of its row."""

    received: ReceivedSnapshot
    before: Tally | None


@dataclass(frozen=True)
class Computed:
    """What one computation gives: the answer, and what the ledger wants to know."""

    plan: plan_pb2.Plan
    seconds: float
    tally: Tally
    snapshot: Snapshot


@dataclass
class _Item:
    """One snapshot of a call; it fails alone."""

    failure: ScissorhandsError | None = None
    record: SessionRecord | None = None
    job: Job | None = None
    ticket: Ticket | None = None
    size: int = 0


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
        self._gate = PlanGate(
            settings.max_plans,
            settings.plan_memory_bytes,
            settings.max_plan_wait,
            settings.plan_threads,
            lambda reason: metrics.plans_shed.labels(reason).inc(),
        )
        self._queue: PlanQueue[Job, Computed | ScissorhandsError] = PlanQueue(_compute, settings.plan_threads)
        self._calls = 0
        self._measuring: asyncio.Task[None] | None = None
        self._measured_until = 0.0

    async def plan(
        self, messages: AsyncIterator[cache_manager_pb2.PlanEvictionsRequest]
    ) -> cache_manager_pb2.PlanEvictionsResponse:
        """Receive some snapshots and return their plans.

        Raises:
            InvalidRequestError: The call does not begin with a snapshot, or has too many.
            CapacityError: There is no room for the first snapshot, or too many calls are in progress.
        """
        began = time.perf_counter()
        items: list[_Item] = []
        result = "failed"
        self._calls += 1
        try:
            await self._receive(messages, items)
            results = await self._results(items)
            result = ""
        except CapacityError:
            result = "shed"
            raise
        except InvalidRequestError:
            result = "refused"
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._calls -= 1
            if result:
                self._metrics.plans.labels(result).inc(max(1, len(items)))
        self._metrics.plan_batch.observe(len(items))
        self._metrics.plan_latency.observe(time.perf_counter() - began)
        return cache_manager_pb2.PlanEvictionsResponse(results=results)

    async def close(self) -> None:
        """Stop measuring and end the threads."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)
        self._queue.close()

    async def _receive(
        self, messages: AsyncIterator[cache_manager_pb2.PlanEvictionsRequest], items: list[_Item]
    ) -> None:
        """Receive all snapshots of a call; each that is refused leaves its reason behind."""
        requests = MessageStream(messages, self._settings.stream_timeout)
        snapshots = SnapshotStream(requests)
        try:
            async with requests.heard_out():
                self._check_calls()
                async for header in snapshots.headers():
                    items.append(_Item())
                    try:
                        await self._receive_one(snapshots, header, items[-1])
                    except (InvalidRequestError, CapacityError) as error:
                        items[-1].failure = error
                        if isinstance(error, CapacityError) and len(items) == 1:
                            raise
        except BaseException:
            for item in items:
                if item.ticket:
                    item.ticket.release()
            raise

    def _check_calls(self) -> None:
        """Turn a call away before any of it is looked at if too many are being received or wait."""
        if self._calls > self._settings.max_plans:
            self._metrics.plans_shed.labels("bound").inc()
            raise CapacityError(
                f"{self._settings.max_plans} calls for plans are in progress, the most", RETRY_AFTER_SECONDS
            )

    async def _receive_one(
        self, snapshots: SnapshotStream, header: cache_manager_pb2.SnapshotHeader, item: _Item
    ) -> None:
        grant = check_granted(header.session, self._settings)
        item.size = check_header(header, grant, self._settings)
        ticket = item.ticket = self._gate.admit(item.size)
        try:
            item.record = self._sessions.recall(header.session)
            received = await snapshots.receive(header, grant)
        except InvalidRequestError:
            ticket.release()
            raise
        item.job = Job(received, item.record.tally if item.record else None)
        self._metrics.snapshot_bytes.inc(received.evidence_bytes)

    async def _results(self, items: list[_Item]) -> list[plan_pb2.PlanResult]:
        whole = [(item, item.job, item.ticket) for item in items if item.job and item.ticket]
        done: list[Computed | ScissorhandsError] = []
        if whole:
            worker = whole[0][1].received.header.session.worker_id
            done = await self._queue.run(worker, [job for _, job, _ in whole], [ticket for _, _, ticket in whole])
        computed: dict[int, Computed] = {}
        for (item, _, _), result in zip(whole, done, strict=True):
            if isinstance(result, ScissorhandsError):
                item.failure = result
                continue
            computed[id(item)] = result
            self._gate.took(item.size, result.seconds)
            self._metrics.plan_compute.observe(result.seconds)
            if item.record is not None:
                self._record(item.record, result)
        results = []
        for item in items:
            if item.failure is None:
                self._metrics.plans.labels("computed").inc()
                results.append(plan_pb2.PlanResult(plan=computed[id(item)].plan))
            else:
                self._metrics.plans.labels("shed" if isinstance(item.failure, CapacityError) else "refused").inc()
                results.append(plan_pb2.PlanResult(failure=_failure(item.failure)))
        return results

    def _record(self, record: SessionRecord, computed: Computed) -> None:
        """Tell the ledger, and measure persistence in the background if nobody waits for the threads."""
        if record.state is not SessionState.OPEN or not self._ledger.evicted(record, computed.tally):
            return
        ahead = self._measured_until - time.monotonic()
        if self._measuring is None and self._queue.idle and ahead < _MEASURING_AHEAD:
            self._measuring = asyncio.create_task(self._measure(record, computed.snapshot))
            self._measuring.add_done_callback(self._measured)

    def _measured(self, _: "asyncio.Task[None]") -> None:
        self._measuring = None

    async def _measure(self, record: SessionRecord, snapshot: Snapshot) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        after = await loop.run_in_executor(self._queue.pool, attention, snapshot)
        before = self._ledger.remember(record, after)
        if before is not None:
            overlaps, surprises = await loop.run_in_executor(self._queue.pool, _compared, before, after)
            spec = record.spec
            self._ledger.persisted(record, by_layer(overlaps, spec.model.kv_heads if spec.grant.by_head else 1))
            # Those of other policies would not get the budgets, and hold other slots.
            if surprises is not None and get_policy(spec.grant.policy, spec.grant.preset).shares_by_loss:
                model = spec.model
                self._ledger.demands.learn(model.fingerprint, model.name, model_shape(model), surprises)
                self._metrics.compared_snapshots.inc()
        ended = time.monotonic()
        self._measured_until = max(self._measured_until, began) + (ended - began) / _MEASURING_SHARE


def _compared(before: Attention, after: Attention) -> tuple[tuple[float, ...], Surprises | None]:
    return persistence(before, after), surprise(before, after)


def _compute(job: Job) -> Computed | ScissorhandsError:
    began = time.perf_counter()
    try:
        snapshot = checked_snapshot(job.received)
        planned = plan(job.received.grant, snapshot)
    except ScissorhandsError as error:
        return error
    message = plan_message(planned)
    told = tally(snapshot, planned, job.before)
    seconds = time.perf_counter() - began
    message.compute_time.FromNanoseconds(round(seconds * 1e9))
    return Computed(message, seconds, told, snapshot)


def _failure(error: ScissorhandsError) -> plan_pb2.PlanFailure:
    status = status_message(error)
    field = error.field if isinstance(error, InvalidRequestError) else ""
    return plan_pb2.PlanFailure(code=status.code, field=field, message=status.message)
