"""A TCP proxy that makes another server seem farther away, behind a narrower line."""

import asyncio
from contextlib import suppress
from typing import Self

# Of up to 64 KiB, on their way in one direction of a connection.
_PIECES = 64


class DelayProxy:
    """Forwards to a port of this machine, each direction late. Use it as an async context manager.

    Args:
        port: The port to forward to.
        delay: How late each direction is, in seconds. May be changed at any time.
        rate: The most that each direction of a connection carries, in bytes a second; None carries all. Like delay.
    """

    def __init__(self, port: int, delay: float, rate: float | None = None) -> None:
        self._target = port
        self.delay = delay
        self.rate = rate
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Keep the order and the pace, but let everything arrive late."""
        # Bounded, so that whoever sends notices when the line is full.
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES)
        with suppress(ConnectionError):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._receive(source, late))
                    group.create_task(self._deliver(late, sink))
            except ExceptionGroup as failures:
                # One end is gone, and takes the other along.
                raise failures.exceptions[0] from None
            finally:
                # A connection left open would hold up the other server's stop.
                sink.close()

    async def _receive(self, source: asyncio.StreamReader, late: "asyncio.Queue[tuple[float, bytes]]") -> None:
        now = asyncio.get_running_loop().time
        data = b"begin"
        while data:
            data = await source.read(65536)
            await late.put((now() + self.delay, data))

    async def _deliver(self, late: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due, data = await late.get()
            if not data:
                return
            await asyncio.sleep(max(0.0, due - now()) + (len(data) / self.rate if self.rate else 0))
            sink.write(data)
            await sink.drain()
