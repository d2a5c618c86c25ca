"""Bytes of a row on their way from the store: the event loop receives them, the engine's thread may wait for them."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import grpc
import numpy as np
from prometheus_client import Counter

from scissorhands.suspended import Part
from scissorhands_server.row_messages import RowChunk
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.transfer import Response, receive


class Arrival:
    """What has come of some buffers so far. Whoever has made it closes it.

    Args:
        sizes: Bytes of each buffer.
        memory: Of which these bytes have been taken; they are given back once it is closed and nothing comes any more.
    """

    def __init__(self, sizes: Sequence[int], memory: Memory) -> None:
        # Not set to zero, which takes a good part of the time of a transfer: nobody reads what has not come.
        self.buffers = [np.empty(size, np.uint8).data for size in sizes]
        self._came = [0] * len(sizes)
        self._memory = memory
        self._size = sum(sizes)
        self._changed = threading.Condition()
        self._began = time.monotonic()
        # How long what has come so far has taken, in seconds.
        self.seconds = 0.0
        self._over = False
        self._closed = False
        self._filling: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def fill(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Let ``work`` receive the bytes; when it ends, in whatever way, nothing comes any more."""
        self._loop = asyncio.get_running_loop()
        self._filling = asyncio.create_task(work)
        self._filling.add_done_callback(lambda _: self._end())
        return self._filling

    async def receive(
        self,
        call: "grpc.aio.UnaryStreamCall[Any, Response | RowChunk]",
        parts: Iterable[tuple[int, Part]],
        received: Counter,
    ) -> None:
        """Receive parts, each with the buffer that it goes on.

        Raises:
            CorruptRowError: They are not whole.
        """
        for buffer, part in parts:
            start = self._came[buffer]
            await receive(call, part, self.buffers[buffer][start : start + part.size])
            received.inc(part.size)
            with self._changed:
                self._came[buffer] += part.size
                self.seconds = time.monotonic() - self._began
                self._changed.notify_all()

    async def ended(self) -> None:
        """Wait until nothing comes any more."""
        if self._filling is not None:
            await asyncio.wait([self._filling])

    @property
    def over(self) -> bool:
        """Whether nothing comes any more."""
        return self._over

    @property
    def whole(self) -> bool:
        """Whether everything has come."""
        return all(came == len(data) for came, data in zip(self._came, self.buffers, strict=True))

    def wait(self, needed: Sequence[int], timeout: float) -> bool:
        """Wait for so many bytes of each buffer, unless nothing comes any more; return whether they have come."""
        until = time.monotonic() + timeout
        with self._changed:
            while not (came := all(have >= need for have, need in zip(self._came, needed, strict=True))):
                left = until - time.monotonic()
                if self._over or left <= 0:
                    break
                self._changed.wait(left)
        return came

    def close(self) -> None:
        """Need the bytes no more; from any thread, and doing so twice is not an error."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._over or self._loop is None:
                self._memory.give_back(self._size)
                return
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._filling is not None:
            self._filling.cancel()

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
            if self._closed:
                self._memory.give_back(self._size)
