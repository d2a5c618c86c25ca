"""A worker as a process that can be killed and started again on its ports."""

import os
import signal
from pathlib import Path
from urllib.request import urlopen

from support.forked import ForkedProgram
from support.processes import START_SECONDS, STOP_SECONDS, free_port, samples, wait_for


class WorkerProcess:
    """``scissorhands worker`` with a model in a folder.

    Args:
        model: The folder.
        log: File to which it logs.
        prepare: Called in its process before it begins.
        options: Its settings.
    """

    def __init__(self, model, log, prepare=None, **options):
        self.port, self.metrics_port = free_port(), free_port()
        self.log, self._prepare = log, prepare
        given = {"model": model, "port": self.port, "metrics_port": self.metrics_port, **options}
        self._words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.start()

    @property
    def pid(self):
        return self._process.pid

    def start(self):
        """Start it and wait until it can be asked for its metrics."""
        with Path(os.devnull).open("wb") as nothing, Path(self.log).open("ab") as log:
            self._process = ForkedProgram(
                "worker", *self._words, stdout=nothing.fileno(), stderr=log.fileno(), prepare=self._prepare
            )
        wait_for(self._answers, "the worker", START_SECONDS)

    def send(self, number):
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self):
        """Kill it, as a crash does."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def terminate(self):
        """Ask it to stop, and return its exit status."""
        self._process.terminate()
        return self._process.wait(STOP_SECONDS)

    def ended(self):
        """Tell whether it is gone."""
        return self._process.poll() is not None

    def stop(self):
        """End it, whatever its state."""
        if not self.ended():
            self.send(signal.SIGCONT)
            self.kill()

    def metrics(self):
        """Return the values of its series, their common prefix left out."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as response:
            found = samples(response.read().decode())
        return {name.removeprefix("scissorhands_worker_"): value for name, value in found.items()}

    def _answers(self):
        assert not self.ended(), f"the worker ended, see {self.log}"
        try:
            return self.metrics()
        except OSError:
            return None
