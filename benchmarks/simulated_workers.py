"""Workers that only ask for plans: sessions, snapshots and calls as a worker makes them, without a model."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.rpc import code_pb2

from scissorhands.budget import Grant
from scissorhands.plan_wire import MOST_SNAPSHOTS, snapshot_parts
from scissorhands.snapshot import LayerEvidence, Snapshot
from scissorhands.v1 import budget_pb2, cache_manager_pb2, cache_manager_pb2_grpc, model_pb2, plan_pb2
from scissorhands.wire import read_grant
from scissorhands_server.worker.plan_calls import GATHER_SECONDS, MOST_CALLS

PLANNED, SHED = "planned", "shed"

_METHOD = "/scissorhands.v1.CacheManagerService/PlanEvictions"
_TIMEOUT = 120.0
_RENEWED_AT_ONCE = 256
# How far a row has come when it asks, in budgets.
_BUDGETS_SEEN = 3


@dataclass
class Session:
    """A row that a worker decodes: its description, and the epoch that it has come to."""

    spec: cache_manager_pb2.SessionSpec
    epoch: int = 1


@dataclass
class Asked:
    """A plan that was asked for: when it was due, when its answer came, and what that was."""

    session: Session
    due: float
    answered: float = 0.0
    result: str = ""

    @property
    def seconds(self) -> float:
        """From when it was due until its answer."""
        return self.answered - self.due


class Evidences:
    """What snapshots carry beside their headers, made once: random, and consistent with a grant.

    Args:
        granted: The grant of all sessions.
        kv_heads: KV heads of each of its entries.
        different: How many there are.
    """

    def __init__(self, granted: Grant, kv_heads: int, different: int = 16) -> None:
        self._granted = granted
        self._kv_heads = kv_heads
        self.step = _BUDGETS_SEEN * max(granted.layer_slots)
        self._written = [self._write(seed) for seed in range(different)]
        self.bytes = len(self._written[0])

    def message(self, session: Session) -> bytes:
        """Return a session's next snapshot, as the one message of its own that it takes."""
        lengths = [slots - self._granted.parameters.lookahead for slots in self._granted.layer_slots]
        header = cache_manager_pb2.SnapshotHeader(
            session=session.spec,
            epoch=session.epoch,
            step=self.step,
            ahead=self._granted.parameters.lookahead,
            incoming=1,
            layer_lengths=lengths,
        )
        part = cache_manager_pb2.SnapshotPart(header=header)
        session.epoch += 1
        # Messages of which each has some parts, one behind the other, are one message with all of them.
        head = cache_manager_pb2.PlanEvictionsRequest(parts=[part]).SerializeToString()
        return head + self._written[session.epoch % len(self._written)]

    def _write(self, seed: int) -> bytes:
        generator = np.random.default_rng(seed)
        ahead = self._granted.parameters.lookahead
        layers = []
        for slots in self._granted.layer_slots:
            shape = (self._kv_heads, slots - ahead)
            order = [np.sort(generator.permutation(self.step)[: shape[1]]) for _ in range(self._kv_heads)]
            layers.append(LayerEvidence(np.stack(order), {"mass": generator.random(shape, dtype=np.float32)}))
        snapshot = Snapshot(0, self.step, ahead, 1, tuple(layers))
        _, *parts = snapshot_parts(snapshot, cache_manager_pb2.SessionSpec())
        return cache_manager_pb2.PlanEvictionsRequest(parts=parts).SerializeToString()


class SimulatedWorker:
    """Asks for plans as a worker does: what is due within 2 ms goes together, in at most four calls at once."""

    def __init__(self, address: str, name: str) -> None:
        # Without a pool of its own, channels to one address would share a connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 16 << 20)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = cache_manager_pb2_grpc.CacheManagerServiceStub(self._channel)
        self._plan = self._channel.stream_unary(
            _METHOD,
            request_serializer=bytes,
            response_deserializer=cache_manager_pb2.PlanEvictionsResponse.FromString,
        )
        self._name = name
        self._evidences: Evidences | None = None
        self._waiting: deque[tuple[Asked, asyncio.Future[None]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._gathering: asyncio.TimerHandle | None = None
        self.sessions: list[Session] = []

    async def close(self) -> None:
        """End the calls and the connection."""
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._channel.close(None)

    async def open(self, count: int, model: model_pb2.ModelInfo, slots: int) -> None:
        """Open sessions with budgets of ``slots`` tokens."""
        for index in range(count):
            spec = cache_manager_pb2.SessionSpec(
                session_id=f"{self._name}-{index}",
                worker_id=self._name,
                model=model,
                prompt_tokens=10 * slots,
                max_new_tokens=1,
                budget=budget_pb2.Budget(tokens=slots),
            )
            asked = cache_manager_pb2.OpenSessionRequest(session=spec)
            response = await self._stub.OpenSession(asked, timeout=_TIMEOUT)
            spec.grant.CopyFrom(response.grant)
            self.sessions.append(Session(spec))

    async def renew(self, every: float) -> None:
        """Keep the sessions' leases, for ever."""
        while True:
            for start in range(0, len(self.sessions), _RENEWED_AT_ONCE):
                specs = [session.spec for session in self.sessions[start : start + _RENEWED_AT_ONCE]]
                await self._stub.RenewSessions(cache_manager_pb2.RenewSessionsRequest(sessions=specs), timeout=_TIMEOUT)
                await asyncio.sleep(every * len(specs) / len(self.sessions))

    async def ask(self, session: Session, evidences: Evidences, due: float = 0.0) -> Asked:
        """Ask for a plan and wait for what becomes of it.

        Args:
            session: Whose.
            evidences: What it sends.
            due: When it should have been asked for, in seconds of ``time.perf_counter``; 0 is now.

        Raises:
            AioRpcError: A call failed for another reason than that the manager had no room.
        """
        self._evidences = evidences
        asked = Asked(session, due or time.perf_counter())
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answered))
        if len(self._waiting) >= MOST_SNAPSHOTS:
            self._send()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send)
        await answered
        return asked

    def _send(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        while self._waiting and len(self._calls) < MOST_CALLS:
            together = [self._waiting.popleft() for _ in range(min(MOST_SNAPSHOTS, len(self._waiting)))]
            call = asyncio.create_task(self._call(together))
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._send()

    async def _call(self, together: Sequence[tuple[Asked, "asyncio.Future[None]"]]) -> None:
        try:
            results = await self._results([asked.session for asked, _ in together])
        except (grpc.aio.AioRpcError, RuntimeError) as error:
            for _, answered in together:
                answered.set_exception(error)
            return
        now = time.perf_counter()
        for (asked, answered), result in zip(together, results, strict=True):
            asked.answered, asked.result = now, result
            answered.set_result(None)

    async def _results(self, sessions: Sequence[Session]) -> list[str]:
        assert self._evidences is not None
        evidences = self._evidences

        async def messages() -> AsyncIterator[bytes]:
            for session in sessions:
                yield evidences.message(session)

        try:
            response = await self._plan(messages(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return [SHED] * len(sessions)
        return [_told(result) for result in response.results]


@dataclass
class Fleet:
    """Some workers and their sessions.

    Args:
        workers: The workers.
        evidences: What their snapshots hold.
    """

    workers: list[SimulatedWorker]
    evidences: Evidences
    _turn: int = field(default=0, repr=False)

    @property
    def sessions(self) -> int:
        """How many there are."""
        return sum(len(worker.sessions) for worker in self.workers)

    def next(self) -> tuple[SimulatedWorker, Session]:
        """Return whoever has waited longest for its turn."""
        worker = self.workers[self._turn % len(self.workers)]
        session = worker.sessions[self._turn // len(self.workers) % len(worker.sessions)]
        self._turn += 1
        return worker, session

    async def saturate(self, rows: int, seconds: float) -> list[Asked]:
        """Let so many rows at once ask for one plan after the other."""
        end = time.perf_counter() + seconds
        found: list[Asked] = []

        async def row() -> None:
            while time.perf_counter() < end:
                worker, session = self.next()
                found.append(await worker.ask(session, self.evidences))

        await asyncio.gather(*(row() for _ in range(rows)))
        return [asked for asked in found if asked.answered <= end]

    async def arrive(self, rate: float, seconds: float, seed: int = 0) -> list[Asked]:
        """Ask for ``rate`` plans a second at random times, whatever becomes of those before (a Poisson process)."""
        began = time.perf_counter()
        tasks = []
        for at in _arrivals(rate, seconds, seed):
            wait = began + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            worker, session = self.next()
            tasks.append(asyncio.create_task(worker.ask(session, self.evidences, began + at)))
        return list(await asyncio.gather(*tasks))


async def fleet(address: str, sessions: int, workers: int, model: model_pb2.ModelInfo, slots: int) -> Fleet:
    """Open sessions of some workers; who asks for it closes each."""
    names = [f"worker-{index}" for index in range(min(workers, sessions))]
    made = [SimulatedWorker(address, name) for name in names]
    counts = [len(range(index, sessions, len(made))) for index in range(len(made))]
    await asyncio.gather(*(worker.open(count, model, slots) for worker, count in zip(made, counts, strict=True)))
    return Fleet(made, Evidences(read_grant(made[0].sessions[0].spec.grant), model.kv_heads))


def outcomes(asked: Sequence[Asked]) -> Counter[str]:
    """Count what became of plans."""
    return Counter(each.result for each in asked)


def _arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    at = float(generator.exponential(1 / rate))
    while at < seconds:
        yield at
        at += float(generator.exponential(1 / rate))


def _told(result: plan_pb2.PlanResult) -> str:
    """Name what became of one snapshot."""
    if result.WhichOneof("result") == "plan":
        return PLANNED
    failure = result.failure
    if failure.code != code_pb2.RESOURCE_EXHAUSTED:
        raise RuntimeError(f"a plan was refused: {failure.field}: {failure.message}")
    return SHED
