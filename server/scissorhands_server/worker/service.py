"""Serving one request: its session, its task, and the events of its stream."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor

from scissorhands.budget import Grant
from scissorhands.errors import (
    CapacityError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    StoppingError,
    UnavailableError,
)
from scissorhands.formats import EXACT
from scissorhands.grant import PolicyRequest, default_budget
from scissorhands.policies import get_policy
from scissorhands.tenant import qualified, split
from scissorhands.v1 import budget_pb2, cache_manager_pb2, generation_pb2, suspension_pb2
from scissorhands.wire import budget_request, grant_message, model_shape, policy_message, profile_message, read_grant
from scissorhands_server.granting import resolve
from scissorhands_server.tenants import caller_tenant
from scissorhands_server.worker.admission import check, requested_policy
from scissorhands_server.worker.engine import Engine
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.outbox import Outbox
from scissorhands_server.worker.prefixes import Prefixes
from scissorhands_server.worker.recalling import Recalling
from scissorhands_server.worker.report import finish_message
from scissorhands_server.worker.resident import check_default, check_resident
from scissorhands_server.worker.sampling import Sampler
from scissorhands_server.worker.settings import WorkerSettings
from scissorhands_server.worker.shadows import sampled
from scissorhands_server.worker.suspension import Suspension
from scissorhands_server.worker.task import Event, Failed, Finished, GenerationRequest, Progress, Rest, Task, Token
from scissorhands_server.worker.text import TextStream
from scissorhands_server.worker.turn import Turn

# How long a stream waits for an event before it makes sure that the engine still runs.
WATCH_SECONDS = 5.0


class GenerationHost:
    """Runs requests on an engine.

    Args:
        loaded: The model.
        engine: The engine.
        link: The link to the manager; None if there is none.
        metrics: The worker's metrics.
        settings: The worker's settings.
        worker_id: Id of this worker.
        suspension: Keeps sessions between their turns; None keeps none.
        prefixes: Loads and stores prefixes that requests share; None does neither.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        link: ManagerLink | None,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
        worker_id: str,
        suspension: Suspension | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.loaded = loaded
        self.settings = settings
        self.link = link
        self._engine = engine
        self._metrics = metrics
        self._worker_id = worker_id
        self._suspension = suspension
        self._prefixes = prefixes
        self._outbox = Outbox(asyncio.get_running_loop())
        # Tokenizing a long prompt takes a while, and a tokenizer may not be used by two threads at once.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._shape = model_shape(loaded.info)
        self._profile = profile_message(loaded.profile) if loaded.profile else None
        name, _, preset = settings.default_policy.partition(":")
        get_policy(name, preset)
        self._default_policy = PolicyRequest(name, preset)
        check_default(settings.resident_codec, loaded)

    @property
    def more_rows(self) -> int:
        """How many more rows, of the size last asked for, could be held."""
        return self._engine.more_rows

    async def stream(self, request: generation_pb2.GenerateRequest) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        """Yield a request's events; leaving the iterator early cancels the request.

        Raises:
            ScissorhandsError: The request is refused, or fails.
        """
        arrived = time.monotonic()
        refused = "error"
        try:
            task, accepted = await self._accept(request, arrived)
            refused = ""
        except (InvalidRequestError, NotFoundError):
            refused = "refused"
            raise
        except (CapacityError, UnavailableError):
            refused = "overloaded"
            raise
        except asyncio.CancelledError:
            refused = "cancelled"
            raise
        finally:
            if refused:
                self._metrics.ended(refused)
        ended = False
        try:
            yield generation_pb2.GenerateResponse(accepted=accepted)
            while not ended:
                event = await self._next(task)
                ended = isinstance(event, Finished | Failed)
                if ended and task.turn and self._suspension:
                    # So that the next turn finds what this one leaves.
                    await self._suspension.settled(task.turn)
                    if isinstance(event, Failed) and isinstance(event.error, StoppingError) and task.turn.stored_bytes:
                        raise StoppingError(split(task.session_id)[1])
                for response in self._responses(task, event):
                    yield response
        finally:
            if not ended:
                self._engine.cancel(task)

    async def _accept(
        self, request: generation_pb2.GenerateRequest, arrived: float
    ) -> tuple[Task, generation_pb2.Accepted]:
        """Check a request, open its session and queue its task."""
        checked = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, check, request, self.loaded, self.settings.default_max_new_tokens
        )
        tenant = caller_tenant()
        task, granted = await self._task(request, tenant, checked, arrived)
        # What follows a resumed row was not read in chunks, so it is no prefix of anything.
        # And what a prefix has evicted is in no archive of this session.
        if self._prefixes and not request.no_prefix_cache and not task.recall and not (task.turn and task.turn.resumed):
            try:
                task.prefix = await self._prefixes.find(tenant, task.grant, checked.prompt)
            except BaseException:
                self._engine.refuse(task)
                raise
        resumed = task.turn.resumed if task.turn else None
        ahead = self._engine.submit(task)
        if resumed:
            try:
                await resumed.arrival.ended()
            except BaseException:
                self._engine.cancel(task)
                raise
        accepted = generation_pb2.Accepted(
            session_id=split(task.session_id)[1],
            prompt_tokens=len(checked.prompt),
            grant=granted,
            max_new_tokens=checked.max_new_tokens,
            queued_ahead=ahead,
            seed=checked.sampling.seed,
            resumed_tokens=resumed.manifest.step if resumed and resumed.arrival.whole else 0,
        )
        return task, accepted

    async def _task(
        self, request: generation_pb2.GenerateRequest, tenant: str, checked: GenerationRequest, arrived: float
    ) -> tuple[Task, budget_pb2.Grant]:
        """Open a session, or its next turn, and make the task that runs under its grant."""
        policy = requested_policy(request, self._default_policy)
        total = len(checked.prompt) + checked.max_new_tokens
        asked = budget_request(request.budget) if request.HasField("budget") else None
        default = default_budget(policy, self.settings.default_budget)
        # Resolved here first: whatever is wrong with the request is told in the same words with and without a manager.
        resident = request.resident_codec or self.settings.resident_codec
        local = resolve(asked or default, policy, self._shape, total, self.loaded.profile, resident)
        self._check_resident(local)
        self._engine.check_capacity(checked.priority, local.bytes)
        spec = cache_manager_pb2.SessionSpec(
            session_id=qualified(tenant, secrets.token_hex(12)),
            worker_id=self._worker_id,
            model=self.loaded.info,
            prompt_tokens=len(checked.prompt),
            max_new_tokens=checked.max_new_tokens,
            budget=request.budget if asked else None,
            policy=policy_message(policy),
            resident_codec=resident,
        )
        turn = await self._turn(request, tenant, spec, checked.prompt)
        try:
            granted = await self._open(spec, local, total)
            if turn:
                granted = turn.grant_for(granted, self._shape, total)
        except BaseException:
            if turn and self._suspension:
                self._suspension.abandon(turn)
            raise
        if self.link:
            spec.grant.CopyFrom(granted)
            self.link.hold(spec)
        shadowed = sampled(secrets.token_hex(4), self.settings.shadow_share)
        task = Task(
            session_id=spec.session_id,
            request=checked,
            grant=read_grant(granted),
            codec=granted.codec,
            sampler=Sampler(checked.sampling),
            text=TextStream(self.loaded.tokenizer, checked.stop),
            outbox=self._outbox,
            arrived=arrived,
            shadowed=shadowed if checked.shadow is None else checked.shadow,
            turn=turn,
            recall=Recalling(checked.recall_share, checked.recall_every) if checked.recall_share else None,
        )
        return task, granted

    async def _turn(
        self,
        request: generation_pb2.GenerateRequest,
        tenant: str,
        spec: cache_manager_pb2.SessionSpec,
        prompt: Sequence[int],
    ) -> Turn | None:
        """Begin the turn of a session that is to be kept, and name it in ``spec``; None if there is none."""
        if not (request.session_id and self._suspension):
            return None
        wanted = suspension_pb2.ResumeSessionRequest(
            session_id=qualified(tenant, request.session_id),
            model=spec.model,
            budget=spec.budget if spec.HasField("budget") else None,
            policy=spec.policy,
            resident_codec=spec.resident_codec,
        )
        turn = await self._suspension.begin(wanted, prompt)
        if turn:
            spec.session_id, spec.fence = turn.session_id, turn.fence
        return turn

    async def _open(self, spec: cache_manager_pb2.SessionSpec, local: Grant, total: int) -> budget_pb2.Grant:
        """Return the manager's grant, or our own if there is none that could be held here."""
        granted = await self.link.open(spec, self._profile) if self.link else None
        if granted is None or not self._can_hold(granted, total):
            codec = self.settings.codec if self.link else ""
            granted = grant_message(local, budget_pb2.GRANT_SOURCE_LOCAL, codec)
        return granted

    def _check_resident(self, granted: Grant) -> None:
        """Refuse slots that could not be packed here."""
        check_resident(granted.codecs, self._shape.head_dim, self.loaded.statistics)

    def _can_hold(self, message: budget_pb2.Grant, total: int) -> bool:
        """Whether a row of a grant can be held here: another manager may err."""
        try:
            granted = read_grant(message)
            self._check_resident(granted)
        except InvalidRequestError:
            return False
        # Of this model's layers, and each sliding one has its window and is as it is.
        shape = granted.shape_of(self._shape)
        slots = granted.layer_slots
        return len(slots) == shape.layers and all(
            slots[layer] == min(shape.window(layer), total) and granted.codec_of(layer) == EXACT
            for layer in range(shape.layers)
            if shape.window(layer)
        )

    async def _next(self, task: Task) -> Event:
        """Return the next event; a stream never hangs, even if the engine's thread should die."""
        while True:
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    return await task.events.get()
            except TimeoutError:
                if not self._engine.alive:
                    raise EngineError("the engine has stopped") from None

    def _responses(self, task: Task, event: Event) -> list[generation_pb2.GenerateResponse]:
        if isinstance(event, Progress):
            progress = generation_pb2.PrefillProgress(done=event.done, total=len(task.request.prompt))
            return [generation_pb2.GenerateResponse(prefill=progress)]
        if isinstance(event, Token):
            delta = generation_pb2.Delta(text=event.text, token_ids=[event.token_id])
            return [generation_pb2.GenerateResponse(delta=delta)]
        if isinstance(event, Rest):
            return [generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=event.text))]
        if isinstance(event, Failed):
            raise event.error
        return [generation_pb2.GenerateResponse(finish=finish_message(task, event, self._shape))]
