"""The command ``scissorhands up``."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from scissorhands.errors import ScissorhandsError
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.serving import ServingSettings
from scissorhands_server.settings import load_settings
from scissorhands_server.up.output import Output, OutputHandler
from scissorhands_server.up.ports import choose_ports
from scissorhands_server.up.supervisor import Patience
from scissorhands_server.up.system import Plan, System
from scissorhands_server.worker.command import worker as worker_command
from scissorhands_server.worker.settings import WorkerSettings

Command = TypeVar("Command", bound=Callable[..., Any])

_MIB = 1 << 20
# What `up` decides for the worker; everything else of the worker's is an option of `up`, too.
_DECIDED = {"host", "port", "metrics_host", "metrics_port", "manager", "default_budget", "default_policy"}
# What holds for both servers.
_SHARED = tuple(ServingSettings.model_fields)
_PASSED_ON = [option for option in worker_command.params if option.name not in _DECIDED]


class Share(click.ParamType[float]):
    """A share of a length: ``20%`` or ``0.2``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the text."""
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"give a share above 0 and at most 1, such as 20% or 0.2, got {text!r}", param, ctx)
        return share


def _port(option: str, default: int, meaning: str) -> Callable[[Command], Command]:
    help_text = f"{meaning} 0 picks a free one."
    return click.option(option, type=click.IntRange(0, 65535), default=default, show_default=True, help=help_text)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that worker and manager listen on.")
@_port("--port", 50051, "gRPC port of the worker.")
@_port("--metrics-port", 9101, "Port of the worker's metrics.")
@_port("--manager-port", 50052, "gRPC port of the manager.")
@_port("--manager-metrics-port", 9102, "Port of the manager's metrics.")
@click.option("--store-url", default="", help="Redis to use, as of the manager's option. Without it, one is started.")
@_port("--store-port", 0, "Loopback port of the store that is started.")
@click.option(
    "--store-bytes",
    type=click.IntRange(min=16 * _MIB),
    default=1024 * _MIB,
    show_default=True,
    help="Most bytes that the store that is started holds.",
)
@click.option("--budget", type=Share(), metavar="SHARE", help="Budget of requests that name none, such as 20%.")
@click.option("--policy", metavar="NAME[:PRESET]", help="Policy of requests that name none.")
@click.option("--restart/--no-restart", default=True, help="Restart a process that ends, or stop everything.")
@click.option(
    "--ready-timeout",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="How long each process may take to become ready; the worker loads its model.",
)
@click.option(
    "--stop-timeout",
    type=click.FloatRange(min=0, max=3600),
    metavar="SECONDS",
    default=30.0,
    show_default=True,
    help="How long each process may take to stop before it is killed.",
)
@click.option(
    "--state-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file with all addresses and process ids; it exists while everything is ready.",
)
def up(
    *,
    host: str,
    port: int,
    metrics_port: int,
    manager_port: int,
    manager_metrics_port: int,
    store_url: str,
    store_port: int,
    store_bytes: int,
    budget: float | None,
    policy: str | None,
    restart: bool,
    ready_timeout: float,
    stop_timeout: float,
    state_file: Path | None,
    **worker: Any,
) -> None:
    """Run store, manager and worker as processes of this machine until Ctrl-C.

    A process that ends is started again; whoever kills 'up' itself leaves none behind. What has no option here is set
    by the environment, as in SCISSORHANDS_MANAGER_LEASE=60. The options of TLS hold for worker and manager; with
    --manager-ca-file and those that go with it, the worker reaches the manager, and 'up' asks both for their health.
    """
    if store_url and store_port:
        raise click.UsageError("--store-port is for the store that is started; leave it out with --store-url")
    if state_file and not state_file.parent.is_dir():
        raise click.UsageError(f"--state-file: there is no folder {state_file.parent}")
    defaults = {"budget": budget, "policy": policy}
    try:
        shared = {name: worker[name] for name in _SHARED}
        working, managing = _check(defaults, store_url, worker, shared)
        wanted = {
            "--port": port,
            "--metrics-port": metrics_port,
            "--manager-port": manager_port,
            "--manager-metrics-port": manager_metrics_port,
        }
        ports = choose_ports(host, wanted)
        plan = Plan(
            host=host,
            worker_port=ports["--port"],
            worker_metrics_port=ports["--metrics-port"],
            manager_port=ports["--manager-port"],
            manager_metrics_port=ports["--manager-metrics-port"],
            store_url=store_url,
            store_access=managing.store_access,
            store_port=0 if store_url else choose_ports("127.0.0.1", {"--store-port": store_port})["--store-port"],
            store_bytes=store_bytes,
            credentials=working.manager_credentials,
            worker_arguments=_arguments({"default_budget": budget, "default_policy": policy, **worker}),
            manager_arguments=_arguments({"budget_fraction": budget, "policy": policy, **shared}),
        )
        patience = Patience(restart=restart, ready=ready_timeout, grace=stop_timeout)
        output = Output()
        with _logging_to(output):
            asyncio.run(_run(System(plan, patience, output, state_file), plan, output))
    except ScissorhandsError as error:
        raise click.ClickException(str(error)) from error


up.params.extend(_PASSED_ON)


@contextmanager
def _logging_to(output: Output) -> Iterator[None]:
    """Show what the store's owner logs; the children show their own."""
    handler = OutputHandler(output, "store")
    logger = logging.getLogger("scissorhands_server")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _check(
    defaults: dict[str, Any], store_url: str, worker: dict[str, Any], shared: dict[str, Any]
) -> tuple[WorkerSettings, ManagerSettings]:
    """Refuse what the processes would refuse, before any is started; return their settings.

    Raises:
        ConfigurationError: A setting is malformed or out of range.
    """
    settings = {name: value for name, value in worker.items() if name != "config"}
    working = load_settings(
        WorkerSettings,
        {**settings, "default_budget": defaults["budget"], "default_policy": defaults["policy"]},
        worker.get("config"),
    )
    managing = load_settings(
        ManagerSettings,
        {
            "store_url": store_url or None,
            "budget_fraction": defaults["budget"],
            "policy": defaults["policy"],
            **shared,
        },
    )
    return working, managing


def _arguments(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the command line that sets ``options``; None leaves one to the process's other sources."""
    words: list[str] = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif value is not None:
            words += [f"--{dashed}", str(value)]
    return tuple(words)


async def _run(system: System, plan: Plan, output: Output) -> None:
    asked = [asyncio.Event(), asyncio.Event()]

    def ask() -> None:
        asked[1 if asked[0].is_set() else 0].set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    running = asyncio.create_task(system.run(lambda: _announce(plan)))
    told = asyncio.create_task(asked[0].wait())
    try:
        await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        failed = running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        output.line("up", "stopping worker, manager and store")
        await _stop(system, asked[1])
    if failed:
        running.result()


async def _stop(system: System, hurry: asyncio.Event) -> None:
    """Stop everything; a second signal ends the grace."""
    stopping = asyncio.create_task(system.stop())
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not stopping.done():
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await system.stop(0)
    else:
        stopping.result()


def _announce(plan: Plan) -> None:
    started = "" if plan.store_url else "  started here, in memory"
    click.echo(
        f"\nready\n"
        f"  worker   {plan.worker}  metrics {plan.metrics(plan.worker_metrics_port)}\n"
        f"  manager  {plan.manager}  metrics {plan.metrics(plan.manager_metrics_port)}\n"
        f"  store    {plan.store}{started}\n"
        f"  try      scissorhands generate 'Once upon a time' --server {plan.worker}\n"
        f"  stop     Ctrl-C\n"
    )
