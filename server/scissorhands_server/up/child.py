"""One child process: started, listened to, and never left behind."""

import asyncio
import codecs
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from scissorhands_server.tether import tethered

# How long the rest of its output is awaited once a child has ended, in seconds; a grandchild may hold the pipe.
_DRAIN_SECONDS = 2.0
_CHUNK_BYTES = 65536
# A longer line is broken, so that a child which never ends one cannot fill our memory.
_MAX_LINE_CHARACTERS = 8192


@dataclass(frozen=True)
class ChildCommand:
    """What to run.

    Args:
        name: Name for people.
        arguments: The program and its arguments.
        environment: Variables to set besides our own.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """Owns one process, which dies with us however we end. Start it on the main thread: the kernel watches the thread.

    Args:
        command: What to run.
        listen: Told every line that it prints.
    """

    def __init__(self, command: ChildCommand, listen: Callable[[str], None]) -> None:
        self.name = command.name
        self.last_line = ""
        self._command = command
        self._listen = listen
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Id of the process; 0 before the first start."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process; the one before must have ended."""
        self.last_line = ""
        # In a session of its own: a Ctrl-C at the terminal is ours to pass on, in order.
        self._process = await asyncio.create_subprocess_exec(
            *tethered(self._command.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._command.environment},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(self._listen_to(self._process.stdout))

    async def wait(self) -> str:
        """Wait until the process has ended and return how, in words."""
        assert self._process is not None
        status = await self._process.wait()
        await self._drain()
        return _described(status, self.last_line)

    async def stop(self, grace: float) -> bool:
        """End the process and return whether it went by itself within ``grace`` seconds."""
        if self._process is None:
            return True
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
        willing = True
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            willing = False
        finally:
            # Also when we are cancelled meanwhile.
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()
        await self._drain()
        return willing

    async def _drain(self) -> None:
        if self._pump is not None:
            _, pending = await asyncio.wait({self._pump}, timeout=_DRAIN_SECONDS)
            for task in pending:
                task.cancel()

    async def _listen_to(self, stream: asyncio.StreamReader) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + decoder.decode(chunk)).splitlines(keepends=True) or [""]
            if rest.endswith(("\n", "\r")) or len(rest) > _MAX_LINE_CHARACTERS:
                lines, rest = [*lines, rest], ""
            for line in lines:
                self._heard(line)
        self._heard(rest)

    def _heard(self, line: str) -> None:
        line = line.rstrip()
        if line:
            self.last_line = line
            self._listen(line)


def _described(status: int, last_line: str) -> str:
    if status >= 0:
        return f"ended with exit status {status}" + (f"; its last line: {last_line}" if last_line else "")
    # Whoever killed it knows why; its last line does not.
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
