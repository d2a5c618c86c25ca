"""A manager, workers and clients for benchmarks, all on this machine."""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from scissorhands_client import AsyncClient, Delta, GenerateOptions, TokenIds
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.server import Worker
from scissorhands_server.worker.settings import WorkerSettings

_TIMEOUT = 3600.0
_READY_SECONDS = 300.0


@dataclass(frozen=True)
class Served:
    """A client of a worker, and what returns the families of its metrics."""

    client: AsyncClient
    registry: Callable[[], Any]


@dataclass(frozen=True)
class Answer:
    """What a client got.

    Args:
        tokens: The answer's tokens.
        began: When it was asked for, in seconds of ``time.perf_counter``.
        times: When each token came.
        last: The last event.
    """

    tokens: list[int]
    began: float
    times: list[float]
    last: Any

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began


async def answer(served: Served, prompt: Sequence[int], options: GenerateOptions) -> Answer:
    """Ask for an answer, and note when each token comes."""
    found = Answer([], time.perf_counter(), [], None)
    last = None
    async with served.client.generate(TokenIds(tuple(prompt)), options) as stream:
        async for last in stream:
            if isinstance(last, Delta):
                found.tokens.extend(last.token_ids)
                found.times.extend([time.perf_counter()] * len(last.token_ids))
    return replace(found, last=last)


async def ask(served: Served, prompt: list[int], options: GenerateOptions) -> tuple[list[int], float, Any]:
    """Return an answer's tokens, the time to the first of them, and the last event."""
    found = await answer(served, prompt, options)
    return found.tokens, found.first, found.last


def figures(served: Served) -> dict[str, float]:
    """Return a worker's metrics without labels, their common prefix left out."""
    return {
        sample.name.removeprefix("scissorhands_worker_"): sample.value
        for family in served.registry()
        for sample in family.samples
        if not sample.labels
    }


@asynccontextmanager
async def manager(store_url: str) -> AsyncIterator[str]:
    """Run a manager as a process of its own; yield its address."""
    async with program(r"manager ready on (\S+)", "manager", "--store-url", store_url) as ready:
        yield ready[1]


@asynccontextmanager
async def worker(loaded: LoadedModel, manager_address: str) -> AsyncIterator[Served]:
    """Run a worker in this process; yield it with a client."""
    settings = WorkerSettings(model="x", port=0, metrics_port=0, manager=manager_address, suspend_deadline=60)
    async with Worker(settings, loaded) as running:
        address, metrics = (f"127.0.0.1:{port}" for port in (running.port, running.metrics_port))
        async with _served(address, metrics) as served:
            yield served


@asynccontextmanager
async def worker_process(model: str, *options: str) -> AsyncIterator[Served]:
    """Run a worker as a process of its own, with these options; yield a client of it."""
    pattern = r"worker ready on (\S+), metrics on (\S+)"
    async with (
        program(pattern, "worker", "--model", model, *options) as ready,
        _served(ready[1], ready[2]) as served,
    ):
        yield served


@asynccontextmanager
async def _served(address: str, metrics: str) -> AsyncIterator[Served]:
    """Connect to a worker, given the addresses of it and of its metrics."""

    def registry() -> Any:
        with urlopen(f"http://{metrics}/metrics") as response:
            return list(text_string_to_metric_families(response.read().decode()))

    async with AsyncClient(address, timeout=_TIMEOUT) as client:
        yield Served(client, registry)


@asynccontextmanager
async def program(pattern: str, name: str, *options: str) -> AsyncIterator[re.Match[str]]:
    """Run one of our servers as its operators do, with one thread; yield what it prints once it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scissorhands", name, *options),
        *("--port", "0", "--metrics-port", "0", "--log-level", "warning"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        ready, said = None, ""
        async with asyncio.timeout(_READY_SECONDS):
            while ready is None:
                line = (await process.stdout.readline()).decode()
                if not line:
                    raise RuntimeError(f"the {name} ended before it was ready")
                said += line
                ready = re.search(pattern, said)
        yield ready
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
