"""``scissorhands up`` as a user runs it, on free ports."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

READY_SECONDS = 120
STOP_SECONDS = 60
# The state of a socket in the kernel's tables, as they write it (include/net/tcp_states.h).
LISTEN = "0A"


class System:
    """A running system.

    Args:
        process: The process of ``up``.
        state_file: The file to which it writes the addresses.
    """

    def __init__(self, process, state_file):
        self.process = process
        self._state_file = state_file

    @property
    def state(self):
        return json.loads(self._state_file.read_text())

    def address(self, part):
        return self.state[part]["address"]

    def pid(self, part):
        return self.state[part]["pid"]

    def signal(self, part, number):
        os.kill(self.pid(part), number)

    def ports(self):
        state = self.state
        urls = [state["worker"]["address"], state["manager"]["address"], state["store"]["url"]]
        urls += [state[part]["metrics"].removesuffix("/metrics") for part in ("worker", "manager")]
        return [int(url.rpartition(":")[2]) for url in urls]


@contextmanager
def running_system(folder, model, *options):
    """Run it, wait until it is ready, and stop it at the end; its output goes to ``folder / "up.log"``."""
    state_file, log = folder / "state.json", folder / "up.log"
    ports = ("--port", "0", "--metrics-port", "0", "--manager-port", "0", "--manager-metrics-port", "0")
    command = [sys.executable, "-m", "scissorhands", "up", "--model", str(model), "--state-file", str(state_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *ports, *options], stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not state_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield System(process, state_file)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_SECONDS)


def descendants(process):
    """Return all processes below one, as handles that stay true when it is gone."""
    return psutil.Process(process.pid).children(recursive=True)


def listening_sockets(ports):
    """Return the inodes of the sockets that listen on some ports: a freed port may be another program's next."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[9] for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) in ports}
