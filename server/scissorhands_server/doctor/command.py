"""The command ``scissorhands doctor``."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scissorhands.credentials import Credentials
from scissorhands.credentials_options import credentials_options
from scissorhands_server.doctor.finding import Finding, Status
from scissorhands_server.doctor.model import Needs, check_disk, check_memory, check_model
from scissorhands_server.doctor.packages import check_packages, check_python
from scissorhands_server.doctor.ports import check_grpc_port, check_metrics_port, check_server
from scissorhands_server.doctor.store import check_embedded_store, check_store

_HOST = "127.0.0.1"
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


@click.command()
@click.option("--model", help="Look at this model too: a folder, a GGUF file or a hub id.")
@click.option(
    "--store-url",
    help="Look at this store, with user, password and certificates of the manager's variables; none: at the embedded "
    "one.",
)
@click.option("--server", metavar="HOST:PORT", help="A worker that should be serving.")
@click.option("--manager", metavar="HOST:PORT", help="A cache manager that should be serving.")
@click.option(
    "--role",
    type=click.Choice(["all", "worker", "manager", "client"]),
    default="all",
    show_default=True,
    help="What is to run on this machine.",
)
@click.option(
    "--cache-folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("~/.cache/scissorhands"),
    show_default=True,
    help="The worker's folder for converted models.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@credentials_options
def doctor(
    *,
    model: str | None,
    store_url: str | None,
    server: str | None,
    manager: str | None,
    role: str,
    cache_folder: Path,
    as_json: bool,
    credentials: Credentials,
) -> None:
    """Check this machine, and say what to do about every fault. Exits with 1 if a check fails."""
    findings = [check_python(), check_packages("")]
    if role in ("all", "manager"):
        findings += _manager_findings(store_url, manager, credentials)
    if role in ("all", "worker"):
        findings += _worker_findings(model, server, cache_folder.expanduser(), credentials)
    if role == "client":
        findings += [
            check_server(name, each, credentials) for name, each in (("worker", server), ("manager", manager)) if each
        ]
    if as_json:
        click.echo(json.dumps([{**asdict(each), "status": each.status.value} for each in findings], indent=2))
    else:
        Console(markup=False, highlight=False).print(_table(findings))
    if any(each.status is Status.FAILED for each in findings):
        sys.exit(1)


def _manager_findings(store_url: str | None, manager: str | None, credentials: Credentials) -> Iterator[Finding]:
    yield check_packages("manager")
    yield from check_store(store_url) if store_url else [check_embedded_store()]
    yield (
        check_server("manager", manager, credentials)
        if manager
        else check_grpc_port("manager port", _HOST, 50052, credentials)
    )
    yield check_metrics_port("manager metrics port", _HOST, 9102)


def _worker_findings(
    model: str | None, server: str | None, cache_folder: Path, credentials: Credentials
) -> Iterator[Finding]:
    yield check_packages("worker")
    needs = Needs()
    if model is not None:
        findings, needs = check_model(model)
        yield from findings
    yield check_memory(needs)
    yield check_disk(needs, cache_folder)
    yield (
        check_server("worker", server, credentials)
        if server
        else check_grpc_port("worker port", _HOST, 50051, credentials)
    )
    yield check_metrics_port("worker metrics port", _HOST, 9101)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("Check", no_wrap=True)
    table.add_column("Result", no_wrap=True)
    table.add_column("Found", overflow="fold")
    table.add_column("What to do", overflow="fold")
    for each in findings:
        table.add_row(each.check, Text(each.status.value, _STYLES[each.status]), each.found, each.fix)
    return table
