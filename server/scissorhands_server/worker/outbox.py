"""From the engine's thread to the streams: what one step has for all of them wakes the event loop once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Outbox:
    """Puts events into queues of an event loop, from another thread.

    Waking the loop takes that thread longer than the event itself, and lets the loop take Python's lock from it.

    Args:
        loop: The loop on which the queues live.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: list[tuple[asyncio.Queue[Any], Any]] | None = None

    def put(self, queue: "asyncio.Queue[Any]", event: object) -> None:
        """Put an event into a queue, at once unless a burst is under way; from the engine's thread."""
        if self._held is None:
            self._loop.call_soon_threadsafe(queue.put_nowait, event)
        else:
            self._held.append((queue, event))

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Hold what is put meanwhile back, and send it together in the end; bursts are not nested."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held:
                self._loop.call_soon_threadsafe(_deliver, held)


def _deliver(held: "list[tuple[asyncio.Queue[Any], Any]]") -> None:
    for queue, event in held:
        queue.put_nowait(event)
