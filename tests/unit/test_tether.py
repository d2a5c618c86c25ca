"""A tethered program dies with the process that started it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from scissorhands_server.tether import tethered

PARENT = """
import subprocess, sys, time
from scissorhands_server.tether import tethered
child = subprocess.Popen(tethered([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid):
    """Tell whether a process has ended; nobody may have collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid):
    end = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(number):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        assert not gone(child)
        os.kill(parent.pid, number)
        parent.wait(timeout=20)
        wait_until_gone(child)


def test_it_becomes_the_command_and_leaves_nothing_between():
    command = tethered([sys.executable, "-c", "import os; print(os.getpid())"])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        assert int(run.stdout.read()) == run.pid


def test_a_child_of_a_parent_that_is_already_gone_does_not_start():
    command = tethered([sys.executable, "-c", "print('ran')"])
    command[command.index(str(os.getpid()))] = "1" if os.getpid() != 1 else "2"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert "ran" not in done.stdout
