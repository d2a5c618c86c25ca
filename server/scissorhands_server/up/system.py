"""The three processes: their commands, how to see that they are ready, and what is told of them."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from scissorhands.credentials import Credentials
from scissorhands.errors import StoreUnavailableError
from scissorhands_server import healthcheck
from scissorhands_server.hosting import address
from scissorhands_server.store.address import Access, StoreAddress
from scissorhands_server.store.embedded import EmbeddedStore
from scissorhands_server.store.redis import RedisStore
from scissorhands_server.up.child import ChildCommand
from scissorhands_server.up.output import Output
from scissorhands_server.up.ports import reachable
from scissorhands_server.up.supervisor import Patience, Probe, Supervisor, SupervisorError, Watched

# How long one question for health may take, in seconds.
_HEALTH_SECONDS = 2.0
# How long a store that was named may take to answer, in seconds.
_STORE_SECONDS = 3.0
_STORE_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Plan:
    """What to bring up.

    Args:
        host: Address that both servers listen on.
        worker_port: gRPC port of the worker.
        worker_metrics_port: Port of the worker's metrics.
        manager_port: gRPC port of the manager.
        manager_metrics_port: Port of the manager's metrics.
        store_url: Store to use; empty starts one.
        store_access: How connections to a store that is named prove and protect themselves.
        store_port: Port on which a started store listens too.
        store_bytes: Most bytes that a started store holds.
        credentials: How both servers are asked for their health.
        worker_arguments: Further arguments of the worker.
        manager_arguments: Further arguments of the manager.
    """

    host: str
    worker_port: int
    worker_metrics_port: int
    manager_port: int
    manager_metrics_port: int
    store_url: str
    store_access: Access
    store_port: int
    store_bytes: int
    credentials: Credentials
    worker_arguments: tuple[str, ...]
    manager_arguments: tuple[str, ...]

    @property
    def worker(self) -> str:
        """Where the worker is reached."""
        return address(reachable(self.host), self.worker_port)

    @property
    def manager(self) -> str:
        """Where the manager is reached."""
        return address(reachable(self.host), self.manager_port)

    @property
    def store(self) -> str:
        """Where the store is reached, without credentials."""
        if not self.store_url:
            return f"redis://127.0.0.1:{self.store_port}"
        return str(StoreAddress.parse(self.store_url))

    def metrics(self, port: int) -> str:
        """Return the URL of a metrics endpoint."""
        return f"http://{address(reachable(self.host), port)}/metrics"


class System:
    """Store, manager and worker from the first start to the last stop.

    Args:
        plan: What to bring up.
        patience: How children are treated.
        output: Where everything is told.
        state_file: JSON file with the addresses, written when all are ready and deleted at the end; None writes none.
    """

    def __init__(self, plan: Plan, patience: Patience, output: Output, state_file: Path | None) -> None:
        self._plan = plan
        self._patience = patience
        self._output = output
        self._state_file = state_file
        self._store = None if plan.store_url else EmbeddedStore(plan.store_bytes, plan.store_port)
        self._supervisor: Supervisor | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Start everything, call ``ready``, and watch until a child ends for good or the task is cancelled.

        Raises:
            SupervisorError: A child did not become ready or ended for good.
            ConfigurationError: The store did not start.
            StoreUnavailableError: The named store does not answer.
        """
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)  # Of an earlier run that was killed.
        url = await self._start_store()
        self._supervisor = Supervisor(
            [self._manager(url), self._worker()], self._patience, self._output, lambda _: self._write_state()
        )
        await self._supervisor.start()
        self._write_state()
        ready()
        keeping = [asyncio.create_task(self._supervisor.keep())]
        if self._store is not None:
            keeping.append(asyncio.create_task(self._watch_store(self._store)))
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        for task in done:
            task.result()

    async def stop(self, grace: float | None = None) -> None:
        """Stop the worker, then the manager, then the store, each within ``grace`` seconds (None: the patience's)."""
        if self._supervisor is not None:
            await self._supervisor.stop(grace)
        if self._store is not None:
            await self._store.stop()
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)

    async def _start_store(self) -> str:
        if self._store is not None:
            await self._store.start()
            self._output.line("up", f"store is ready on {self._plan.store}")
            return self._store.url
        named = RedisStore(self._plan.store_url, _STORE_SECONDS, connections=1, access=self._plan.store_access)
        try:
            await named.ping()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(
                f"the store at {self._plan.store} does not answer: {error}; "
                "start it, or leave --store-url out to have one started"
            ) from error
        finally:
            await named.close()
        return self._plan.store_url

    def _manager(self, store_url: str) -> Watched:
        plan = self._plan
        arguments = [
            *("--host", plan.host, "--port", str(plan.manager_port)),
            *("--metrics-host", plan.host, "--metrics-port", str(plan.manager_metrics_port)),
            *plan.manager_arguments,
        ]
        # In the environment, as it may hold a password and everybody can read command lines.
        environment = {"SCISSORHANDS_MANAGER_STORE_URL": store_url}
        return Watched(_command("manager", arguments, environment), _health_of(plan.manager, plan.credentials))

    def _worker(self) -> Watched:
        plan = self._plan
        arguments = [
            *("--host", plan.host, "--port", str(plan.worker_port)),
            *("--metrics-host", plan.host, "--metrics-port", str(plan.worker_metrics_port)),
            *("--manager", plan.manager),
            *plan.worker_arguments,
        ]
        return Watched(_command("worker", arguments, {}), _health_of(plan.worker, plan.credentials))

    async def _watch_store(self, store: EmbeddedStore) -> None:
        """Notice that the store, which restarts itself, has another process id."""
        known = store.pid
        while True:
            await asyncio.sleep(_STORE_POLL_SECONDS)
            if store.pid == known:
                continue
            if not self._patience.restart:
                raise SupervisorError("store ended")
            known = store.pid
            self._write_state()

    def _write_state(self) -> None:
        if self._state_file is None or self._supervisor is None:
            return
        plan, pids = self._plan, self._supervisor.pids
        state: dict[str, Any] = {
            "up": {"pid": os.getpid()},
            "worker": {
                "address": plan.worker,
                "metrics": plan.metrics(plan.worker_metrics_port),
                "pid": pids["worker"],
            },
            "manager": {
                "address": plan.manager,
                "metrics": plan.metrics(plan.manager_metrics_port),
                "pid": pids["manager"],
            },
            "store": {"url": plan.store, "pid": self._store.pid if self._store else None},
        }
        # Whoever reads it sees a whole file or none.
        draft = self._state_file.with_name(f".{self._state_file.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            draft.replace(self._state_file)
        except OSError as error:
            raise SupervisorError(f"cannot write {self._state_file}: {error.strerror}") from error
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()


def _command(name: str, arguments: list[str], environment: Mapping[str, str]) -> ChildCommand:
    return ChildCommand(name, [sys.executable, "-m", "scissorhands", name, *arguments], environment)


def _health_of(server: str, credentials: Credentials) -> Probe:
    async def probe() -> str:
        try:
            await asyncio.to_thread(healthcheck.check, server, _HEALTH_SECONDS, credentials)
        except click.ClickException as lack:
            return lack.message
        return ""

    return probe
