"""Starts children in order, starts one again when it dies, and stops them in the opposite order."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from scissorhands.errors import ScissorhandsError
from scissorhands_server.up.child import Child, ChildCommand
from scissorhands_server.up.output import Output

_POLL_SECONDS = 0.2
_STILL_WAITING_SECONDS = 15.0

# Says what a child still lacks; empty when it is ready. It must answer within a few seconds.
Probe = Callable[[], Awaitable[str]]


class SupervisorError(ScissorhandsError):
    """A child did not become ready, or ended for good."""


@dataclass(frozen=True)
class Watched:
    """A child and how to see that it is ready."""

    command: ChildCommand
    probe: Probe


@dataclass(frozen=True)
class Patience:
    """How a supervisor treats its children.

    Args:
        restart: Start a child again when it ends after it was ready.
        ready: How long a child may take to become ready, in seconds.
        grace: How long a child may take to stop before it is killed, in seconds.
        backoff: Pause before the first restart, in seconds; doubled with each failure in a row.
        longest_backoff: The longest pause, in seconds.
        steady: A child that was ready for so long, in seconds, has not failed in a row when it ends.
        failures: Failures in a row after which everything is stopped.
    """

    restart: bool = True
    ready: float = 600.0
    grace: float = 30.0
    backoff: float = 1.0
    longest_backoff: float = 30.0
    steady: float = 10.0
    failures: int = 10


class Supervisor:
    """Owns children from the first start to the last stop.

    Args:
        watched: The children in the order of their start.
        patience: How they are treated.
        output: Where their lines and ours go.
        changed: Called with the name of a child that is ready again under another process id.
    """

    def __init__(
        self, watched: Sequence[Watched], patience: Patience, output: Output, changed: Callable[[str], None]
    ) -> None:
        self._patience = patience
        self._output = output
        self._changed = changed
        self._children = [(Child(each.command, self._listener(each.command.name)), each.probe) for each in watched]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; 0 for a child that was never started."""
        return {child.name: child.pid for child, _ in self._children}

    async def start(self) -> None:
        """Start the children one after the other, each when the one before is ready.

        Raises:
            SupervisorError: One did not become ready. The others still run; call :meth:`stop`.
        """
        for child, probe in self._children:
            await child.start()
            with self._output.waiting(f"waiting for {child.name}"):
                await self._wait_ready(child, probe)

    async def keep(self) -> None:
        """Watch the started children, and start again those that end.

        Raises:
            SupervisorError: A child ended and is not to be started again.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for child, probe in self._children:
                    tasks.create_task(self._keep(child, probe))
        except ExceptionGroup as group:
            # Not `except*`: before Python 3.11.4 it wraps what is raised in it into another group.
            failed, others = group.split(SupervisorError)
            if failed is None or others is not None:
                raise
            raise failed.exceptions[0] from None

    async def stop(self, grace: float | None = None) -> None:
        """Stop the children, the last one started first.

        Args:
            grace: How long each may take before it is killed, in seconds; None takes the patience's.
        """
        for child, _ in reversed(self._children):
            if child.pid and not await child.stop(self._patience.grace if grace is None else grace):
                self._output.line("up", f"{child.name} did not stop in time and was killed")

    def _listener(self, name: str) -> Callable[[str], None]:
        return lambda line: self._output.line(name, line)

    async def _keep(self, child: Child, probe: Probe) -> None:
        failures = 0
        ready_since: float | None = time.monotonic()
        while True:
            how = await child.wait()
            if not self._patience.restart:
                raise SupervisorError(f"{child.name} {how}")
            was_steady = ready_since is not None and time.monotonic() - ready_since >= self._patience.steady
            failures = 1 if was_steady else failures + 1
            ready_since = None
            if failures > self._patience.failures:
                raise SupervisorError(f"{child.name} failed {failures} times in a row; at last it {how}")
            pause = min(self._patience.backoff * 2 ** (failures - 1), self._patience.longest_backoff)
            self._output.line("up", f"{child.name} {how}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            await child.start()
            try:
                await self._wait_ready(child, probe)
            except SupervisorError as error:
                # One more failure: the process is gone, so that the loop's wait returns at once.
                self._output.line("up", str(error))
                await child.stop(self._patience.grace)
            else:
                ready_since = time.monotonic()
                self._changed(child.name)

    async def _wait_ready(self, child: Child, probe: Probe) -> None:
        begun = time.monotonic()
        ended = asyncio.create_task(child.wait())
        probing = asyncio.create_task(self._probe_until_ready(child.name, probe))
        try:
            done, _ = await asyncio.wait(
                {ended, probing}, timeout=self._patience.ready, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            probing.cancel()
            ended.cancel()
        # Looked at first: if it has ended, then somebody else answers in its place.
        if ended in done:
            raise SupervisorError(f"{child.name} did not become ready: it {ended.result()}")
        if probing not in done:
            raise SupervisorError(
                f"{child.name} was not ready after {self._patience.ready:g} s; its last line: {child.last_line}"
            )
        probing.result()
        self._output.line("up", f"{child.name} is ready after {time.monotonic() - begun:.1f} s")

    async def _probe_until_ready(self, name: str, probe: Probe) -> None:
        begun = told = time.monotonic()
        while lack := await probe():
            now = time.monotonic()
            if now - told >= _STILL_WAITING_SECONDS:
                told = now
                self._output.line("up", f"still waiting for {name} after {now - begun:.0f} s: {lack}")
            await asyncio.sleep(_POLL_SECONDS)
