"""The link to the cache manager: one channel, its health, and the sessions that this worker holds there.

Nothing here is waited for by the engine. While the manager is away, its answers are simply missing: grants and plans
are computed here, segments wait within their bound, and the health check finds the manager again. Behind its name may
be several managers, each of which can answer any call: the link is up while one of them answers.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2

from scissorhands.credentials import Credentials, connection_hint
from scissorhands.errors import CapacityError, InvalidRequestError
from scissorhands.v1 import budget_pb2, cache_manager_pb2, cache_manager_pb2_grpc, model_pb2
from scissorhands_server.row_messages import RowCalls
from scissorhands_server.worker.manager_channel import ManagerChannel
from scissorhands_server.worker.metrics import WorkerMetrics

LOGGER = logging.getLogger(__name__)

HEALTH_INTERVAL_SECONDS = 0.5
# Sessions that one renewal may carry.
RENEWAL_BATCH = 1024
RENEWAL_LOOK_SECONDS = 0.25
DEFAULT_LEASE_SECONDS = 30.0

_REASONS = {
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.INVALID_ARGUMENT: "refused",
    grpc.StatusCode.UNAUTHENTICATED: "refused",
    grpc.StatusCode.PERMISSION_DENIED: "refused",
}

_NOT_ALLOWED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ManagerLink:
    """A worker's connection to its manager. Lives on the event loop; :attr:`up` may be read from any thread.

    Args:
        address: ``host:port`` of the manager, or of several (:class:`ManagerChannel`).
        metrics: The worker's metrics.
        deadline: Deadline of calls, in seconds.
        credentials: How it is reached; None does without TLS.

    Raises:
        InvalidRequestError: A file of the credentials cannot be used.
    """

    def __init__(
        self, address: str, metrics: WorkerMetrics, deadline: float, credentials: Credentials | None = None
    ) -> None:
        self.address = address
        self.deadline = deadline
        self.metrics = metrics
        self._up = asyncio.Event()
        self._doubt = asyncio.Event()
        self._sessions: dict[str, cache_manager_pb2.SessionSpec] = {}
        self._lease = DEFAULT_LEASE_SECONDS
        self._channel = ManagerChannel(address, credentials)
        self._hint = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._undoing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look for the manager once, then keep looking and renewing leases."""
        await self._check()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._renew())]

    async def stop(self) -> None:
        """Stop looking and close the channel."""
        tasks = (*self._tasks, *self._undoing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    @property
    def stub(self) -> "cache_manager_pb2_grpc.CacheManagerServiceAsyncStub":
        """The manager's calls; not to be kept, as a changed certificate changes it."""
        return self._channel.stub

    @property
    def rows(self) -> RowCalls:
        """The calls that carry rows; as :attr:`stub`."""
        return self._channel.rows

    @property
    def up(self) -> bool:
        """Whether the manager answered last."""
        return self._up.is_set()

    async def wait_up(self) -> None:
        """Wait until the manager answers; the caller sets the deadline."""
        await self._up.wait()

    def suspect(self) -> None:
        """Ask nothing of the manager until it has answered a health check again."""
        if self.up:
            LOGGER.warning("the cache manager at %s does not answer; going on without it", self.address)
        self._up.clear()
        self.metrics.manager_up.set(0)

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Count a failed call; after one that got no answer, the health check looks at once whether anybody answers."""
        self.metrics.manager_errors.labels(_REASONS.get(error.code(), "other")).inc()
        if error.code() in _UNANSWERED:
            self._doubt.set()
        if error.code() in _NOT_ALLOWED:
            self._tell(f"give manager_token_file: {error.details()}")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            # Whoever lets a deadline pass may let the check's pass as well.
            self.suspect()

    def session(self, session_id: str) -> cache_manager_pb2.SessionSpec | None:
        """Return what was opened under an id; None once it is closed."""
        return self._sessions.get(session_id)

    async def open(
        self, spec: cache_manager_pb2.SessionSpec, profile: model_pb2.Profile | None = None
    ) -> budget_pb2.Grant | None:
        """Ask for a grant; None if the manager does not answer.

        Args:
            spec: The session.
            profile: What eviction costs in the model's KV heads; None if that was not measured.

        Raises:
            CapacityError: The manager holds as many sessions as it can.
            InvalidRequestError: The manager refuses the request.
        """
        if not self.up:
            return None
        opening = asyncio.create_task(self._open(spec, profile))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The manager may have opened it already, and nobody else would close it.
            undoing = asyncio.create_task(self._undo(opening, spec))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def _open(
        self, spec: cache_manager_pb2.SessionSpec, profile: model_pb2.Profile | None
    ) -> budget_pb2.Grant | None:
        try:
            request = cache_manager_pb2.OpenSessionRequest(session=spec, profile=profile)
            response = await self.stub.OpenSession(request, timeout=self.deadline)
        except grpc.aio.AioRpcError as error:
            self.failed(error)
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise CapacityError(f"the cache manager is full: {error.details()}", 1.0) from error
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequestError("session", f"the cache manager refuses it: {error.details()}") from error
            return None
        self._lease = response.grant.lease.ToTimedelta().total_seconds() or DEFAULT_LEASE_SECONDS
        return response.grant

    async def _undo(
        self, opening: "asyncio.Task[budget_pb2.Grant | None]", spec: cache_manager_pb2.SessionSpec
    ) -> None:
        with suppress(CapacityError, InvalidRequestError):
            await opening
            # The segments of a session that has had other turns stay.
            closing = cache_manager_pb2.CloseSessionRequest(
                session_id=spec.session_id, discard_segments=not spec.fence, fence=spec.fence
            )
            await self.close(closing)

    def hold(self, spec: cache_manager_pb2.SessionSpec) -> None:
        """Renew the lease of a session, grant included, until :meth:`release`."""
        self._sessions[spec.session_id] = spec

    def release(self, session_id: str) -> bool:
        """Stop renewing a lease; False if it was not held."""
        return self._sessions.pop(session_id, None) is not None

    async def close(self, request: cache_manager_pb2.CloseSessionRequest) -> bool:
        """Close a session; False if the manager did not answer or had no room for the call."""
        try:
            await self.stub.CloseSession(request, timeout=self.deadline)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                self.failed(error)
            return error.code() not in (*_UNANSWERED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        return True

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_SECONDS):
                    await self._doubt.wait()
            self._doubt.clear()
            self._channel.renew()
            await self._check()

    async def _check(self) -> None:
        try:
            response = await self._channel.health.Check(health_pb2.HealthCheckRequest(), timeout=self.deadline)
        except grpc.aio.AioRpcError as error:
            self._tell(connection_hint(error.details() or "", "--manager-"))
            self.suspect()
            return
        if response.status != health_pb2.HealthCheckResponse.SERVING:
            self.suspect()
        elif not self.up:
            self._hint = ""
            LOGGER.info("the cache manager at %s answers", self.address)
            self._up.set()
            self.metrics.manager_up.set(1)

    def _tell(self, hint: str) -> None:
        """Log what is wrong with the connection, once."""
        if hint and hint != self._hint:
            LOGGER.warning("the cache manager at %s cannot be used: %s", self.address, hint)
        self._hint = hint

    async def _renew(self) -> None:
        renewed = time.monotonic()
        while True:
            # Looked at often: the next session may get a shorter lease than the last.
            await asyncio.sleep(min(self._lease / 3, RENEWAL_LOOK_SECONDS))
            if time.monotonic() - renewed < self._lease / 3:
                continue
            renewed = time.monotonic()
            for ids in _batches(list(self._sessions)):
                # Without those that the engine's thread has released meanwhile.
                specs = [spec for session_id in ids if (spec := self._sessions.get(session_id)) is not None]
                if not self.up:
                    break
                try:
                    request = cache_manager_pb2.RenewSessionsRequest(sessions=specs)
                    await self.stub.RenewSessions(request, timeout=self.deadline)
                except grpc.aio.AioRpcError as error:
                    self.failed(error)


def _batches(ids: list[str]) -> Iterable[list[str]]:
    return (ids[start : start + RENEWAL_BATCH] for start in range(0, len(ids), RENEWAL_BATCH))
