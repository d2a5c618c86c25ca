"""``scissorhands store``: what lies in the store, and the care for it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scissorhands.credentials import Credentials
from scissorhands_client.commands.failures import reported
from scissorhands_client.commands.options import manager_options
from scissorhands_client.commands.summary import to_json
from scissorhands_client.commands.terminal import write_text
from scissorhands_client.manager import STORE_TIMEOUT, ManagerClient
from scissorhands_client.stored import GarbageItem, StoreState, VerifiedObject

Command = TypeVar("Command", bound=Callable[..., Any])

_SAID = {
    "dead_page": "pages that nothing names",
    "broken": "objects without one of their parts",
    "gone_object": "entries of objects that are gone",
    "found_object": "objects that had no entry",
    "mended_entry": "entries with wrong sizes",
    "quota": "objects beyond the quota",
    "high_water": "objects beyond the high-water mark",
}


def _shared(command: Command) -> Command:
    return manager_options(click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command))


_timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    metavar="SECONDS",
    default=STORE_TIMEOUT,
    show_default=True,
    help="Longest time for all of it.",
)


@click.group()
def store() -> None:
    """Show what lies in the store, mend it and check it."""


@store.command("stat")
@_shared
def stat_command(*, manager: str, credentials: Credentials, as_json: bool) -> None:
    """Show what is stored, by tenant and kind, and what bounds it."""
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        state = client.get_store()
    if as_json:
        write_text(to_json(asdict(state), indent=2) + "\n")
        return
    console = Console(markup=False)
    console.print(_totals(state))
    console.print(_bounds(state))


@store.command("gc")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@_timeout
@_shared
def gc_command(*, dry_run: bool, timeout: float, manager: str, credentials: Credentials, as_json: bool) -> None:
    """Mend what crashes have left behind, and evict what is beyond a bound.

    The manager does the same by itself, a piece at a time; this does all of it now.
    """
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        items = list(client.collect_garbage(dry_run=dry_run, timeout=timeout))
    if as_json:
        write_text(to_json({"dry_run": dry_run, "items": [asdict(each) for each in items]}, indent=2) + "\n")
    elif items:
        Console(markup=False).print(_garbage(items))
        write_text("nothing was changed: --dry-run\n" if dry_run else "")
    else:
        click.echo("nothing to do")


@store.command("verify")
@click.option("--delete", is_flag=True, help="Delete objects that are not whole.")
@click.option(
    "--object-timeout",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="Longest time for reading one object.",
)
@_timeout
@_shared
def verify_command(
    *, delete: bool, object_timeout: float, timeout: float, manager: str, credentials: Credentials, as_json: bool
) -> None:
    """Read every object and check every checksum. The exit status is 1 if one is not whole."""
    bad: list[VerifiedObject] = []
    checked, size = 0, 0
    console = Console(stderr=True)
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TextColumn("objects"), TimeElapsedColumn())
    with (
        reported(manager),
        ManagerClient(manager, credentials=credentials) as client,
        Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress,
    ):
        task = progress.add_task("", total=None)
        for each in client.verify_store(delete=delete, object_timeout=object_timeout, timeout=timeout):
            checked += 1
            size += each.size_bytes
            bad += [each] if each.error else []
            progress.update(task, total=max(each.objects, checked), completed=checked)
    if as_json:
        told = {"objects": checked, "size_bytes": size, "bad": [asdict(each) for each in bad]}
        write_text(to_json(told, indent=2) + "\n")
    else:
        if bad:
            Console(markup=False).print(_bad(bad))
        click.echo(f"{checked:,} objects of {decimal(size)} were read, {len(bad):,} are not whole")
    if bad:
        raise click.exceptions.Exit(1)


def _totals(state: StoreState) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("Tenant", "Kind"):
        table.add_column(name)
    for name in ("Objects", "Size"):
        table.add_column(name, justify="right")
    for each in state.totals:
        table.add_row(each.tenant, each.kind, f"{each.objects:,}", decimal(each.size_bytes))
    return table


def _bounds(state: StoreState) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    low = f", then down to {state.low_share:.0%} of it"
    table.add_row("Quota of a tenant", f"{decimal(state.quota_bytes)}{low}" if state.quota_bytes else "none")
    table.add_row("High-water mark", f"{decimal(state.high_bytes)}{low}" if state.high_bytes else "none")
    if not state.memory_policy:
        table.add_row("Memory", "unknown: the manager's user may not ask")
        return table
    most = f"{decimal(state.most_memory_bytes)}, then {state.memory_policy}" if state.most_memory_bytes else "no bound"
    table.add_row("Memory", f"{decimal(state.used_memory_bytes)} of {most}")
    table.add_row("Keys looked up", f"{state.key_hits:,} found, {state.key_misses:,} in vain")
    table.add_row("Keys dropped", f"{state.keys_evicted:,} by the store itself, for want of memory")
    return table


def _garbage(items: list[GarbageItem]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("What", "Kind"):
        table.add_column(name)
    for name in ("Number", "Size"):
        table.add_column(name, justify="right")
    numbers = Counter((each.what, each.kind) for each in items)
    for (what, kind), number in sorted(numbers.items()):
        size = sum(each.size_bytes for each in items if (each.what, each.kind) == (what, kind))
        table.add_row(_SAID.get(what, what), kind, f"{number:,}", decimal(size))
    return table


def _bad(bad: list[VerifiedObject]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("Tenant", "Kind"):
        table.add_column(name, no_wrap=True)
    table.add_column("Name", overflow="fold")
    table.add_column("What is wrong", overflow="fold")
    table.add_column("Deleted")
    for each in bad:
        table.add_row(each.tenant, each.kind, each.name, each.error, "yes" if each.deleted else "no")
    return table
