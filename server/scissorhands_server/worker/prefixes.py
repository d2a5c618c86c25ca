"""Prefixes that requests share: what a prompt begins with comes from the store, and what is new of it goes there.

Whatever goes wrong is a miss: the prompt is read, and the reason is counted. Nothing waits for a boundary on its way to
the store.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import grpc

from scissorhands.budget import Grant
from scissorhands.errors import MismatchError
from scissorhands.prefix import Boundary, PrefixIdentity, PrefixManifest, boundaries, in_transfer
from scissorhands.prefix_state import PrefixPiece
from scissorhands.suspended import cut, describe
from scissorhands.v1 import prefix_pb2
from scissorhands.wire import model_shape
from scissorhands_server.row_messages import RowChunk, row_chunks
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.prefix import LoadedPrefix, PassedBoundary, Prefix
from scissorhands_server.worker.prefix_rates import Rates
from scissorhands_server.worker.resident import resident_version
from scissorhands_server.worker.settings import WorkerSettings
from scissorhands_server.worker.transfer import Miss, failure_reason, misses, next_header

LOGGER = logging.getLogger(__name__)

Request = prefix_pb2.StorePrefixRequest
Responses = grpc.aio.UnaryStreamCall[Any, prefix_pb2.LoadPrefixResponse | RowChunk]


class Prefixes:
    """Finds and stores prefixes. Lives on the event loop; :meth:`send` and :meth:`sending` are for any thread.

    Args:
        loaded: The model.
        link: The link to the manager.
        settings: The worker's settings.
        memory: What bounds the bytes of rows.
    """

    def __init__(self, loaded: LoadedModel, link: ManagerLink, settings: WorkerSettings, memory: Memory) -> None:
        info = loaded.info
        self._base = PrefixIdentity(
            model=info.fingerprint,
            tokenizer=info.tokenizer_fingerprint,
            dtype=info.dtype,
            policy="",
            budget="",
            resident_codec="",
            codec_version="",
            tenant="",
        )
        self._shape = model_shape(info)
        self._statistics = loaded.statistics
        self._link = link
        self._every = settings.prefix_tokens
        self._deadline = settings.suspend_deadline
        self._memory = memory
        self._metrics = link.metrics.prefix
        self._rates = Rates(settings.prefix_advantage)
        self._loop = asyncio.get_running_loop()
        # Bounded by the memory that what waits in it takes.
        self._waiting: asyncio.Queue[PassedBoundary] = asyncio.Queue()
        self._keys: set[bytes] = set()
        self._sender: asyncio.Task[None] | None = None
        self._coming: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin sending."""
        self._sender = asyncio.create_task(self._send_all())

    async def stop(self, grace: float) -> None:
        """Send what waits, for at most ``grace`` seconds, then stop."""
        if self._sender is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._waiting.join()
            for task in (self._sender, *self._coming):
                task.cancel()
            await asyncio.gather(self._sender, *self._coming, return_exceptions=True)

    async def find(self, tenant: str, grant: Grant, prompt: Sequence[int]) -> Prefix | None:
        """Find the longest stored prefix of a prompt, and let it come.

        Args:
            tenant: Whose prompt it is.
            grant: The grant of its row.
            prompt: Its token ids.

        Returns:
            What the row begins with, if anything, and what it is to leave; None if the prompt is too short, or nobody
            can be asked now.
        """
        base = replace(self._base, codec_version=resident_version(grant, self._statistics), tenant=tenant)
        places = boundaries(base, grant, self._shape, prompt, self._every)
        if not places:
            return None
        if not self._link.up:
            self._missed("manager_unavailable")
            return None
        prefix = Prefix(self._memory, self._metrics, self._rates, self)
        began = time.monotonic()
        try:
            with self._misses(prefix, places):
                await self._load(prefix, places, began)
        finally:
            if prefix.loaded is None:
                self._metrics.lookup_time.observe(time.monotonic() - began)
        return prefix

    def sending(self, key: bytes) -> bool:
        """Whether a boundary is on its way to the store already."""
        return key in self._keys

    def send(self, passed: PassedBoundary) -> None:
        """Send a boundary to the store, some time."""
        self._keys.add(passed.boundary.key)
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, passed)

    async def _load(self, prefix: Prefix, places: Sequence[Boundary], began: float) -> None:
        """Let the longest stored prefix come, and tell what of the prompt is not stored yet.

        Raises:
            Miss: There is none, or no memory for it, or reading is faster.
            MismatchError: It is of something else.
            CorruptRowError: A manifest cannot be read.
        """
        asked = [prefix_pb2.PrefixBoundary(key=place.key, whole=place.whole) for place in places]
        request = prefix_pb2.LoadPrefixRequest(boundaries=asked, tenant=places[0].identity.tenant)
        call: Responses = self._link.rows.load(request, timeout=self._deadline)
        try:
            header = await next_header(call)
            manifests = [PrefixManifest.parse(manifest) for manifest in header.manifests]
            prefix.want(_missing(places, manifests, header.asked_before))
            if not manifests:
                raise Miss("new")
            _check(places, manifests)
            sizes = [sum(part.size for part in one.grown) for one in manifests]
            sizes.append(sum(part.size for part in manifests[-1].evidence))
            if not self._rates.worth(manifests[-1].step, sum(sizes)):
                raise Miss("slower")
            if not self._memory.take(sum(sizes)):
                raise Miss("no_room")
            arrival = Arrival(sizes, self._memory)
            *grown, evidence = arrival.buffers
            pieces = [PrefixPiece(one, data, evidence) for one, data in zip(manifests, grown, strict=True)]
            prefix.loaded = LoadedPrefix(tuple(pieces), arrival)
            filling = arrival.fill(self._receive(prefix, places, prefix.loaded, call, began))
            self._coming.add(filling)
            filling.add_done_callback(self._coming.discard)
        finally:
            if prefix.loaded is None:
                call.cancel()

    async def _receive(
        self, prefix: Prefix, places: Sequence[Boundary], loaded: LoadedPrefix, call: Responses, began: float
    ) -> None:
        """Receive all of a prefix."""
        with self._misses(prefix, places):
            try:
                chain = [piece.manifest for piece in loaded.pieces]
                parts = [(len(chain) if place.evidence else place.boundary, place.part) for place in in_transfer(chain)]
                await loaded.arrival.receive(call, parts, self._metrics.load_bytes)
                self._rates.loaded(sum(part.size for _, part in parts), loaded.arrival.seconds)
            finally:
                call.cancel()
                self._metrics.lookup_time.observe(time.monotonic() - began)

    def _misses(self, prefix: Prefix, places: Sequence[Boundary]) -> AbstractContextManager[None]:
        """Count why a prefix is not there; what was broken of it has been deleted, and is left anew."""

        def missed(reason: str) -> None:
            self._missed(reason)
            if reason in ("corrupt", "missing"):
                prefix.want(places)

        return misses(self._link, missed, "a prefix")

    async def _send_all(self) -> None:
        while True:
            passed = await self._waiting.get()
            try:
                await self._store(passed)
            finally:
                self._keys.discard(passed.boundary.key)
                self._memory.give_back(passed.size)
                self._waiting.task_done()

    async def _store(self, passed: PassedBoundary) -> None:
        """Send a boundary to the store."""
        result = "failed"
        try:
            if not self._link.up:
                result = "manager_unavailable"
                return
            pieces = [cut(data) for data in passed.saved]
            grown, evidence = [await asyncio.to_thread(describe, each) for each in pieces]
            at = passed.boundary
            manifest = PrefixManifest(
                at.key, at.identity, at.start, at.step, passed.epoch, passed.lengths, grown, evidence
            )
            messages = _messages(manifest.pack(), [*pieces[0], *pieces[1]])
            response = await self._link.rows.store(messages, timeout=self._deadline)
            self._metrics.store_bytes.inc(response.stored_bytes)
            result = "stored" if response.stored_bytes else "known"
        except grpc.aio.AioRpcError as error:
            result = failure_reason(self._link, error)
            LOGGER.info("a prefix of %d tokens is not stored: %s", passed.boundary.step, error.details())
        except ValueError as error:
            LOGGER.warning("a prefix of %d tokens cannot be stored: %s", passed.boundary.step, error)
        finally:
            self._metrics.stores.labels(result).inc()

    def _missed(self, reason: str) -> None:
        self._metrics.lookups.labels(reason).inc()


def _missing(places: Sequence[Boundary], stored: Sequence[PrefixManifest], asked_before: int) -> list[Boundary]:
    """Return the boundaries to store.

    Of whole states, two at most: the last, for whoever has the same prompt, and the last that an earlier prompt had too
    (as Marconi admits states, arXiv 2411.19379): that is where prompts go apart, and the next of them will ask for it.
    """
    end = stored[-1].step if stored else 0
    whole = {places[-1].step} | ({places[asked_before - 1].step} if 0 < asked_before <= len(places) else set())
    return [place for place in places if place.step > end and (not place.whole or place.step in whole)]


def _check(places: Sequence[Boundary], stored: Sequence[PrefixManifest]) -> None:
    """Make sure that what is stored is of these boundaries.

    Raises:
        MismatchError: It is not.
    """
    asked = {place.key: place for place in places}
    for manifest in stored:
        if manifest.key not in asked:
            raise MismatchError(("key",))
        manifest.check(asked[manifest.key])


def _messages(manifest: bytes, pieces: Sequence[memoryview]) -> Iterator[Request | RowChunk]:
    yield Request(header=prefix_pb2.StorePrefixHeader(manifest=manifest))
    for piece in pieces:
        yield from row_chunks(piece)
