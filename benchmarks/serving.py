"""A manager, workers and clients for benchmarks, all on this machine."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from scissorhands_client import AsyncClient, Delta, GenerateOptions, TokenIds
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.server import Worker
from scissorhands_server.worker.settings import WorkerSettings

_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Served:
    """A worker and a client of it."""

    worker: Worker
    client: AsyncClient
    registry: Any


async def ask(served: Served, prompt: list[int], options: GenerateOptions) -> tuple[list[int], float, Any]:
    """Return an answer's tokens, the time to the first of them, and the last event."""
    tokens: list[int] = []
    began, first, last = time.perf_counter(), 0.0, None
    async with served.client.generate(TokenIds(tuple(prompt)), options) as stream:
        async for last in stream:
            if isinstance(last, Delta):
                first = first or time.perf_counter() - began
                tokens += last.token_ids
    return tokens, first, last


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
    command = [sys.executable, "-m", "scissorhands", "manager", "--store-url", store_url]
    process = await asyncio.create_subprocess_exec(
        *command, "--port", "0", "--metrics-port", "0", "--log-level", "warning", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        found = None
        while found is None:
            found = re.search(r"manager ready on (\S+)", (await process.stdout.readline()).decode())
        yield found[1]
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def worker(loaded: LoadedModel, manager_address: str) -> AsyncIterator[Served]:
    """Run a worker in this process; yield it with a client."""
    settings = WorkerSettings(model="x", port=0, metrics_port=0, manager=manager_address, suspend_deadline=60)
    async with (
        Worker(settings, loaded) as running,
        AsyncClient(f"127.0.0.1:{running.port}", timeout=_TIMEOUT) as client,
    ):

        def registry() -> Any:
            with urlopen(f"http://127.0.0.1:{running.metrics_port}/metrics") as response:
                return list(text_string_to_metric_families(response.read().decode()))

        yield Served(running, client, registry)
