"""A TCP proxy that makes another server seem farther away."""

import asyncio
from contextlib import suppress
from typing import Self


class DelayProxy:
    """Forwards to a port of this machine, each direction late. Use it as an async context manager.

    Args:
        port: The port to forward to.
        delay: How late each direction is, in seconds.
    """

    def __init__(self, port: int, delay: float) -> None:
        self._target = port
        self._delay = delay
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
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()

        delivery = asyncio.create_task(deliver())
        try:
            while data := await source.read(65536):
                late.put_nowait((loop.time() + self._delay, data))
            late.put_nowait((loop.time() + self._delay, b""))
            await delivery
        except ConnectionError:
            pass
        finally:
            # A connection left open would hold up the other server's stop.
            sink.close()
            delivery.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await delivery
