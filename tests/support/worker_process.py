"""A worker as a process of its own."""

import os
from contextlib import contextmanager

from support.forked import ForkedProgram
from support.tiny_worker import tiny_folder
from support.waiting import SECONDS


@contextmanager
def worker_process(log, *options: str):
    """Start a worker; yield it with its address once it is ready."""
    words = ("worker", "--model", str(tiny_folder()), "--port", "0", "--metrics-port", "0", *options)
    reading, writing = os.pipe()
    with os.fdopen(reading) as output:
        try:
            with log.open("wb") as errors:
                process = ForkedProgram(*words, stdout=writing, stderr=errors.fileno())
        finally:
            os.close(writing)
        try:
            ready = output.readline()
            assert ready.startswith("worker ready on "), log.read_text()
            yield process, ready.split()[3].rstrip(",")
        finally:
            process.kill()
            process.wait(SECONDS)
