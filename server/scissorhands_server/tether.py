"""Runs a program that dies with the process that started it, however that ends.

``python -m scissorhands_server.tether PARENT COMMAND...`` asks the kernel for SIGKILL at the death of the parent and
then becomes the command, so no process of its own remains. Where the kernel has no such request (macOS) it only becomes
the command, and a parent that is killed leaves it behind.

The kernel watches the thread that started us, not the process: start it from one that lives as long as the process.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_FEWEST_ARGUMENTS = 2


def tethered(command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` tethered to this process."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def main(arguments: Sequence[str]) -> None:
    """Tether this process to its parent and become the command."""
    if len(arguments) < _FEWEST_ARGUMENTS:
        sys.exit("usage: python -m scissorhands_server.tether PARENT COMMAND...")
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the kernel was asked.
        if os.getppid() != int(parent):
            sys.exit("the parent process is gone")
    os.execvp(command[0], command)  # noqa: S606 - Becoming the given command is what this program is for.


if __name__ == "__main__":
    main(sys.argv[1:])
