"""Programs of ours as processes of their own, forked from one that has imported what they need.

They differ from programs that are started by name in the second, or six, that their imports take. ``scissorhands up``
and the documented commands start both servers by name, and have tests of their own.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.reduction import DupFd

from scissorhands.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
# What a program imports when it is named.
_CONTEXT.set_forkserver_preload(
    ["scissorhands.cli", "scissorhands_server.manager.command", "scissorhands_server.worker.command"]
)


class ForkedProgram:
    """``scissorhands`` with the given words, running.

    Args:
        words: Its command line.
        stdout: File descriptor that it prints to.
        stderr: File descriptor of its log; None takes ours.
        environment: Its environment variables. Those that libraries read when imported are those of the first program.
        prepare: Called in its process before it begins; None calls nothing.
    """

    def __init__(
        self,
        *words: str,
        stdout: int,
        stderr: int | None = None,
        environment: Mapping[str, str] = os.environ,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        output = {1: DupFd(stdout), 2: DupFd(2 if stderr is None else stderr)}
        # No daemon of multiprocessing's: those may have no processes of their own.
        self._process = _CONTEXT.Process(target=_run, args=(words, output, dict(environment), prepare))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Wait until it has ended, and return its exit status.

        Raises:
            TimeoutError: It goes on.
        """
        self._process.join(seconds)
        if (status := self.poll()) is None:
            raise TimeoutError(f"still running after {seconds} s")
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        # Its end is known here a moment after it.
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, as a crash does."""
        self.send_signal(signal.SIGKILL)


def _run(
    words: tuple[str, ...],
    output: dict[int, DupFd],
    environment: dict[str, str],
    prepare: Callable[[], object] | None,
) -> None:
    for number, given in output.items():
        descriptor = given.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    sys.argv = ["scissorhands", *words]
    main()
