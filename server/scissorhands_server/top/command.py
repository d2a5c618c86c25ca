"""The command ``scissorhands top``."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain

import click
from rich.console import Console
from rich.live import Live

from scissorhands_server.top.look import Servers, Silent
from scissorhands_server.top.states import ManagerState, WorkerState, manager_state, worker_state
from scissorhands_server.top.tables import tables

# What a pipe gets, which has no width of its own.
_WIDE = 200

Found = tuple[list[WorkerState | Silent], list[ManagerState | Silent]]


@click.command()
@click.option(
    "--worker",
    "workers",
    multiple=True,
    default=("127.0.0.1:9101",),
    show_default=True,
    metavar="HOST:PORT",
    help="Metrics endpoint of a worker, or its URL; several times for several.",
)
@click.option(
    "--manager",
    "managers",
    multiple=True,
    default=("127.0.0.1:9102",),
    show_default=True,
    metavar="HOST:PORT",
    help="Metrics endpoint of a manager, or its URL; several times for several.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    help="From one look to the next; rates are those in between.",
)
@click.option("--once", is_flag=True, help="Look twice, print and end. Exits with 1 if a server does not answer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a look.")
def top(*, workers: Sequence[str], managers: Sequence[str], interval: float, once: bool, as_json: bool) -> None:
    """Show live what workers and managers do: rows, budgets, tokens, compression, plans and hits."""
    looked = Servers(workers, worker_state), Servers(managers, manager_state)
    found = _look(looked)
    with suppress(KeyboardInterrupt):
        if once:
            time.sleep(interval)
            found = _look(looked)
            _print(found, as_json=as_json)
            sys.exit(int(any(isinstance(each, Silent) for each in chain(*found))))
        if as_json:
            while True:
                time.sleep(interval)
                _print(_look(looked), as_json=True)
        with Live(tables(*found), console=Console(markup=False), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(tables(*_look(looked)), refresh=True)


def _look(looked: tuple[Servers[WorkerState], Servers[ManagerState]]) -> Found:
    workers, managers = looked
    return workers.look(), managers.look()


def _print(found: Found, *, as_json: bool) -> None:
    if as_json:
        workers, managers = found
        click.echo(
            json.dumps({"workers": [asdict(one) for one in workers], "managers": [asdict(one) for one in managers]})
        )
        return
    console = Console(markup=False)
    Console(markup=False, width=console.width if console.is_terminal else _WIDE).print(tables(*found))
