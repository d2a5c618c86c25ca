"""Keeping sessions between their turns: rows come from the store when a turn begins, and go there when it ends.

Whatever goes wrong with a row is a miss: the prompt is read anew, and the reason is counted. Only a session that
another turn holds fails a request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from scissorhands.budget import Grant
from scissorhands.errors import SessionConflictError
from scissorhands.suspended import Manifest, SuspendedIdentity, asked_identity, cut, describe, token_digest
from scissorhands.v1 import budget_pb2, suspension_pb2
from scissorhands.wire import read_grant
from scissorhands_server.row_messages import RowChunk, row_chunks
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.kept_row import KeptRow
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.resident import resident_version
from scissorhands_server.worker.settings import WorkerSettings
from scissorhands_server.worker.task import Task
from scissorhands_server.worker.transfer import Miss, failure_reason, misses, next_header, next_message, retry_delay
from scissorhands_server.worker.turn import ResumedRow, Turn
from scissorhands_server.worker.uploader import Uploader

LOGGER = logging.getLogger(__name__)

# How long a turn that finds its session held waits before it looks again.
POLL_SECONDS = 0.05

Asked = suspension_pb2.ResumeSessionRequest
Request = suspension_pb2.SuspendSessionRequest
Responses = grpc.aio.UnaryStreamCall[Asked, suspension_pb2.ResumeSessionResponse | RowChunk]


class Suspension:
    """Begins and ends the turns of sessions that are kept. Lives on the event loop.

    Args:
        loaded: The model.
        link: The link to the manager.
        uploader: Takes the ends of sessions.
        settings: The worker's settings.
        memory: What bounds the bytes of rows.
    """

    def __init__(
        self, loaded: LoadedModel, link: ManagerLink, uploader: Uploader, settings: WorkerSettings, memory: Memory
    ) -> None:
        self._statistics = loaded.statistics
        self._link = link
        self._uploader = uploader
        self._deadline = settings.suspend_deadline
        self._patience = settings.session_patience
        self._metrics = link.metrics.suspension
        self._memory = memory
        self._background: set[asyncio.Task[Any]] = set()

    async def stop(self, grace: float) -> None:
        """Let what is under way end, for at most ``grace`` seconds."""
        if self._background:
            await asyncio.wait(self._background, timeout=grace)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def begin(self, asked: Asked, prompt: Sequence[int]) -> Turn | None:
        """Take the lease of a session, and get its row if it has one that this turn can go on from.

        Args:
            asked: The session, and what its row must be of.
            prompt: Token ids of the whole conversation.

        Returns:
            The turn, None if the session cannot be kept now; then it runs like a request of no session.

        Raises:
            SessionConflictError: Another turn holds the session, and does not end in time.
        """
        beginning = asyncio.create_task(self._begin(asked, prompt))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The lease may have been taken already, and nobody else would give it up.
            self._run(self._undo(beginning))
            raise

    def abandon(self, turn: Turn) -> None:
        """End a turn that never became a task."""
        turn.drop_resumed()
        self._uploader.end(turn.session_id, discard=False, fence=turn.fence)

    def end(self, task: Task) -> None:
        """End a task's turn: send what it leaves, then close its session."""
        self._run(self._end(task))

    async def settled(self, turn: Turn) -> None:
        """Wait until it is known whether a turn's row is in the store; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline):
                await turn.settled.wait()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _undo(self, beginning: "asyncio.Task[Turn | None]") -> None:
        with contextlib.suppress(SessionConflictError):
            turn = await beginning
            if turn is not None:
                self.abandon(turn)

    async def _begin(self, asked: Asked, prompt: Sequence[int]) -> Turn | None:
        if not self._link.up:
            self._missed("manager_unavailable")
            return None
        began = time.monotonic()
        coming = False
        try:
            while True:
                try:
                    turn = await self._resume(asked, prompt, began)
                except SessionConflictError:
                    if time.monotonic() >= began + self._patience:
                        self._missed("conflict")
                        raise
                else:
                    coming = turn is not None and turn.resumed is not None
                    return turn
                await asyncio.sleep(POLL_SECONDS)
        finally:
            if not coming:
                self._metrics.resume_time.observe(time.monotonic() - began)

    async def _resume(self, asked: Asked, prompt: Sequence[int], began: float) -> Turn | None:
        """Take the lease, and let the row come if there is one to go on from."""
        call = self._link.rows.resume(asked, timeout=self._deadline)
        turn: Turn | None = None
        with misses(self._link, self._missed, f"session {asked.session_id}"):
            try:
                header = await next_header(call)
                turn = Turn(asked, header.fence, self._memory, self._metrics)
                turn.resumed = await self._found(turn, call, header.manifest, prompt)
                filling = turn.resumed.arrival.fill(self._receive(turn.resumed, call, asked.session_id, began))
                self._background.add(filling)
                filling.add_done_callback(self._background.discard)
            except grpc.aio.AioRpcError as error:
                if turn is None and error.code() is grpc.StatusCode.ABORTED:
                    raise SessionConflictError(str(error.details()), retry_delay(error)) from error
                raise
            finally:
                if turn is None or turn.resumed is None:
                    call.cancel()
        return turn

    async def _found(self, turn: Turn, call: Responses, manifest: bytes, prompt: Sequence[int]) -> ResumedRow:
        """Make sure that a prompt can go on from a row, and return it, nothing of it received yet.

        Raises:
            Miss: There is none, or it is no beginning of the prompt, or there is no memory for it.
            MismatchError: It is of something else.
            CorruptRowError: Its manifest cannot be read.
        """
        if not manifest:
            await next_message(call)  # Fails: the manager says that nothing is stored.
        found = Manifest.parse(manifest)
        message = budget_pb2.Grant.FromString(found.grant)
        grant = read_grant(message)
        tokens = token_digest(prompt[: found.step])
        asked = self._identity(turn, resident_version(grant, self._statistics), found.identity.tokens)
        found.identity.check(asked)
        # The last token of a prompt is always read: what comes next is chosen by what the model says after it.
        if found.identity.tokens != tokens or found.step >= len(prompt):
            raise Miss("tokens")
        if not self._memory.take(found.state_bytes):
            raise Miss("no_room")
        return ResumedRow(found, grant, message, Arrival([found.state_bytes], self._memory))

    async def _receive(self, row: ResumedRow, call: Responses, session_id: str, began: float) -> None:
        """Receive all of a row."""
        with misses(self._link, self._missed, f"session {session_id}"):
            try:
                parts = ((0, part) for part in row.manifest.parts)
                await row.arrival.receive(call, parts, self._metrics.resume_bytes)
            finally:
                call.cancel()
                self._metrics.resume_time.observe(time.monotonic() - began)

    async def _end(self, task: Task) -> None:
        turn = task.turn
        assert turn is not None
        try:
            turn.drop_resumed()
            if turn.kept is not None:
                await self._store(task.grant, turn, turn.kept)
        finally:
            turn.drop_kept()
            self._uploader.end(turn.session_id, discard=False, quality=task.quality.message(), fence=turn.fence)
            turn.settled.set()

    async def _store(self, grant: Grant, turn: Turn, kept: KeptRow) -> None:
        """Send a row to the store."""
        began = time.monotonic()
        result = "failed"
        try:
            pieces = cut(kept.data)
            identity = self._identity(turn, resident_version(grant, self._statistics), kept.tokens)
            parts = await asyncio.to_thread(describe, pieces)
            held = turn.grant.SerializeToString()
            manifest = Manifest(identity, kept.step, kept.epoch, kept.prompt, kept.lengths, held, parts)
            messages = _messages(turn, manifest.pack(), pieces)
            response = await self._link.rows.suspend(messages, timeout=self._deadline)
            turn.stored_bytes = response.stored_bytes
            self._metrics.suspend_bytes.inc(response.stored_bytes)
            result = "suspended"
        except grpc.aio.AioRpcError as error:
            result = failure_reason(self._link, error)
            LOGGER.info("the row of session %s is not kept: %s", turn.session_id, error.details())
        except ValueError as error:
            LOGGER.warning("the row of session %s cannot be kept: %s", turn.session_id, error)
        finally:
            self._metrics.suspends.labels(result).inc()
            self._metrics.suspend_time.observe(time.monotonic() - began)

    def _identity(self, turn: Turn, codec_version: str, tokens: str) -> SuspendedIdentity:
        return replace(asked_identity(turn.asked), codec_version=codec_version, tokens=tokens)

    def _missed(self, reason: str) -> None:
        self._metrics.resumes.labels(reason).inc()


def _messages(turn: Turn, manifest: bytes, pieces: Sequence[memoryview]) -> Iterator[Request | RowChunk]:
    header = suspension_pb2.SuspendHeader(session_id=turn.session_id, fence=turn.fence, manifest=manifest)
    yield Request(header=header)
    for piece in pieces:
        yield from row_chunks(piece)
