"""A worker as a process of its own."""

import subprocess
import sys
from contextlib import contextmanager

from support.tiny_worker import tiny_folder
from support.waiting import SECONDS


@contextmanager
def worker_process(log, *options: str):
    """Start a worker as its operators do; yield it with its address once it is ready."""
    command = [sys.executable, "-m", "scissorhands", "worker", "--model", str(tiny_folder())]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0", "--metrics-port", "0", *options], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        ready = process.stdout.readline()
        assert ready.startswith("worker ready on "), log.read_text()
        yield process, ready.split()[3].rstrip(",")
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()
