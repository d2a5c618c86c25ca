"""A manager in a process of its own, which tests kill, stop and start again at the same address."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_SECONDS = 30


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ManagerProcess:
    """Use it as a context manager.

    Args:
        store_url: Address of the store; none starts the embedded one.
        log: File that its output goes to.
        options: More command-line options.
    """

    def __init__(self, log: Path, store_url: str = "", options: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.metrics_port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._log = log
        self._options = (*(("--store-url", store_url) if store_url else ()), *options)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        arguments = ["--port", str(self.port), "--metrics-port", str(self.metrics_port), *self._options]
        output: IO[bytes]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scissorhands", "manager", *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        deadline = time.monotonic() + START_SECONDS
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self._process.poll() is None, self._log.read_text()
                try:
                    response = stub.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        raise AssertionError(f"the manager did not start: {self._log.read_text()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a chance to clean up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=10)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=10)
