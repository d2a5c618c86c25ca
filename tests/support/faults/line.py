"""A line between two programs that can be long, narrow, lossy, dead, or cut."""

import asyncio
import random
from contextlib import suppress

# Of up to 64 KiB, on their way in one direction of a connection.
_PIECES = 64
# How late a lost packet is: the least time after which Linux sends it again (TCP_RTO_MIN).
_AGAIN = 0.2


class Line:
    """A TCP proxy on a port of its own to a port of this machine. Use it as an async context manager.

    What it does to the bytes may be changed at any time, and holds for connections that are there, too.

    Args:
        port: The port to forward to.
        seed: Seed of what is lost.

    Attributes:
        delay: How late each direction is, in seconds.
        rate: The most that each direction of a connection carries, in bytes a second; None carries all.
        loss: Share of pieces that are lost and sent again, as TCP does.
        dead: Whether nothing passes, though connections stay and are accepted, as when a network is partitioned.
        refuses: Whether new connections are closed at once.
    """

    def __init__(self, port, seed=0):
        self._target = port
        self._random = random.Random(seed)
        self._tasks, self._writers = set(), set()
        self._alive = asyncio.Event()
        self.port = 0
        self.heal()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception):
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def dead(self):
        return not self._alive.is_set()

    @dead.setter
    def dead(self, value):
        (self._alive.clear if value else self._alive.set)()

    def heal(self):
        """Let everything pass again."""
        self.delay, self.rate, self.loss, self.refuses, self.dead = 0.0, None, 0.0, False, False

    def cut(self):
        """Reset all connections that are there."""
        for writer in list(self._writers):
            writer.transport.abort()

    def _accept(self, reader, writer):
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader, writer):
        writers = [writer]
        self._writers.add(writer)
        try:
            if not self.refuses:
                await self._alive.wait()
                there, back = await asyncio.open_connection("127.0.0.1", self._target)
                writers.append(back)
                self._writers.add(back)
                async with asyncio.TaskGroup() as group:
                    ways = [group.create_task(self._forward(*way)) for way in ((reader, back), (there, writer))]
                    # One end is gone, and takes the other along.
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for way in ways:
                        way.cancel()
        except (OSError, ExceptionGroup):
            pass  # The end that is left sees its connection closed.
        finally:
            for one in writers:
                one.close()
                self._writers.discard(one)

    async def _forward(self, source, sink):
        """Keep the order and the pace, but let everything arrive late."""
        # Bounded, so that whoever sends notices when the line is full.
        late = asyncio.Queue(_PIECES)
        with suppress(OSError):
            receiving = asyncio.ensure_future(self._receive(source, late))
            try:
                await self._deliver(late, sink)
            finally:
                receiving.cancel()

    async def _receive(self, source, late):
        now, data = asyncio.get_running_loop().time, b"begin"
        while data:
            try:
                data = await source.read(65536)
            except OSError:
                data = b""
            lost = _AGAIN if self._random.random() < self.loss else 0
            await late.put((now() + self.delay + lost, data))

    async def _deliver(self, late, sink):
        now = asyncio.get_running_loop().time
        while True:
            due, data = await late.get()
            if not data:
                return
            await asyncio.sleep(max(0.0, due - now()) + (len(data) / self.rate if self.rate else 0))
            await self._alive.wait()
            sink.write(data)
            await sink.drain()
