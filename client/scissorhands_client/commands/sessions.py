"""``scissorhands sessions``: what a cache manager's sessions hold."""

from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from scissorhands.credentials import Credentials
from scissorhands_client.commands.failures import reported
from scissorhands_client.commands.options import manager_options
from scissorhands_client.commands.summary import budget_text, quality_rows, to_json
from scissorhands_client.commands.terminal import write_text
from scissorhands_client.manager import ManagerClient
from scissorhands_client.records import Session, SessionState

Command = TypeVar("Command", bound=Callable[..., Any])

_STATES = [state.value for state in SessionState if state is not SessionState.UNSPECIFIED]


def _shared(command: Command) -> Command:
    return manager_options(click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command))


@click.group()
def sessions() -> None:
    """Show what the cache manager's sessions hold; suspend, resume and delete them."""


@sessions.command("list")
@click.option("--state", type=click.Choice(_STATES), help="Only sessions in this state.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most sessions, the newest first."
)
@_shared
def list_command(*, state: str | None, limit: int, manager: str, credentials: Credentials, as_json: bool) -> None:
    """List sessions, the newest first."""
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        wanted = None if state is None else SessionState(state)
        found = list(islice(client.list_sessions(wanted, page_size=min(limit, 1000)), limit))
    if as_json:
        write_text(to_json([asdict(each) for each in found], indent=2) + "\n")
    elif found:
        Console(markup=False).print(_overview(found))
    else:
        click.echo("no sessions")


@sessions.command("show")
@click.argument("session_id", metavar="ID")
@_shared
def show_command(*, session_id: str, manager: str, credentials: Credentials, as_json: bool) -> None:
    """Show one session with its segments."""
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        session = client.get_session(session_id)
    if as_json:
        write_text(to_json(asdict(session), indent=2) + "\n")
        return
    console = Console(markup=False)
    console.print(_details(session))
    if session.segments:
        console.print(_segments(session))


@sessions.command("suspend")
@click.argument("session_id", metavar="ID")
@_shared
def suspend_command(*, session_id: str, manager: str, credentials: Credentials, as_json: bool) -> None:
    """Let no turn of a session begin until 'resume', and keep its row.

    Its row is in the store since the end of its last turn, and no worker holds anything of it. It is not evicted, but
    ends with its time to live, which begins anew. Refused while a turn runs.
    """
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        row = client.pause_session(session_id)
    write_text(
        to_json(asdict(row), indent=2) + "\n"
        if as_json
        else f"suspended: {decimal(row.size_bytes)} stay until {row.expire_time:%Y-%m-%d %H:%M:%S} UTC\n"
    )


@sessions.command("resume")
@click.argument("session_id", metavar="ID")
@_shared
def resume_command(*, session_id: str, manager: str, credentials: Credentials, as_json: bool) -> None:
    """Let turns of a session begin again, and check that its row can be loaded.

    A row that is not whole is deleted, and the exit status is 1: the next turn reads its prompt anew.
    """
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        found = client.unpause_session(session_id)
    if as_json:
        write_text(to_json(asdict(found), indent=2) + "\n")
    elif found.row is not None:
        write_text(f"resumed: the next turn goes on from {decimal(found.row.size_bytes)}, all of it checked\n")
    else:
        write_text(f"resumed: the next turn reads its prompt anew ({found.broken or 'nothing is stored'})\n")
    if found.broken:
        raise click.exceptions.Exit(1)


@sessions.command("delete")
@click.argument("session_id", metavar="ID")
@_shared
def delete_command(*, session_id: str, manager: str, credentials: Credentials, as_json: bool) -> None:
    """Delete all that the store has of one session: its row and its segments."""
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        deleted = client.delete_session(session_id)
    told = (
        to_json({"session_id": session_id, "deleted": deleted}, indent=2) if as_json else f"{deleted:,} values deleted"
    )
    write_text(told + "\n")


def _overview(found: list[Session]) -> Table:
    # Few columns, so that ids stay whole on a narrow terminal; `show` and `--json` tell the rest.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("Session", "State", "Opened (UTC)"):
        table.add_column(name, no_wrap=True)
    for name in ("Seen", "Evicted", "Row", "Archive"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Used (UTC)", no_wrap=True)
    table.add_column("Pinned", no_wrap=True)
    for each in found:
        table.add_row(
            each.session_id,
            each.state.value,
            f"{each.open_time:%Y-%m-%d %H:%M}" if each.open_time else "",
            f"{each.step:,}",
            f"{each.evicted_slots:,}",
            _size(each, "row"),
            _size(each, "archive") or (decimal(each.segment_bytes) if each.segment_bytes else ""),
            f"{max(use for use in used):%H:%M:%S}" if (used := [one.last_use_time for one in each.stored]) else "",
            "yes" if any(one.pin_end_time for one in each.stored) else "",
        )
    return table


def _size(session: Session, kind: str) -> str:
    """Return the size of what is stored of a session, empty if nothing is."""
    return next((decimal(each.size_bytes) for each in session.stored if each.kind == kind), "")


def _details(session: Session) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Session", session.session_id)
    table.add_row("State", session.state.value)
    if session.open_time is not None:
        table.add_row("Opened", f"{session.open_time:%Y-%m-%d %H:%M:%S} UTC")
    if session.lease_end_time is not None:
        table.add_row("Lease until", f"{session.lease_end_time:%Y-%m-%d %H:%M:%S} UTC")
    table.add_row("Worker", session.worker_id)
    table.add_row("Model", f"{session.model.name} ({session.model.architecture}, {session.model.dtype})")
    table.add_row("Tokens", f"{session.prompt_tokens:,} prompt, at most {session.max_new_tokens:,} new")
    table.add_row("Asked for", f"budget {session.budget or 'default'}, policy {session.policy or 'default'}")
    if session.grant is not None:
        table.add_row("Granted", f"{budget_text(session.grant)}, {decimal(session.grant.bytes)}")
    table.add_row("Tokens seen", f"{session.step:,} at the last snapshot")
    table.add_row("Resident", f"{session.resident_slots:,} slots")
    table.add_row("Evicted", f"{session.evicted_slots:,} slots in {session.evictions:,} evictions")
    table.add_row("Attention mass dropped", f"{session.mass_dropped:.2%}")
    if session.persistence:
        mean = sum(session.persistence) / len(session.persistence)
        low, high = min(session.persistence), max(session.persistence)
        table.add_row("Persistence", f"{mean:.2%} on average, {low:.2%} to {high:.2%} over the layers")
    for name, text in quality_rows(session.quality) if session.quality else ():
        table.add_row(name, text)
    if session.suspended is not None:
        waiting = session.suspended
        by_hand = ", by hand: no turn begins until 'scissorhands sessions resume'" if waiting.paused else ""
        table.add_row("Suspended", f"{waiting.step:,} tokens in the store, {decimal(waiting.size_bytes)}{by_hand}")
    table.add_row("Segments", f"{session.segment_count:,} in the store, {decimal(session.segment_bytes)}")
    for each in session.stored:
        pin = f", pinned until {each.pin_end_time:%H:%M:%S}" if each.pin_end_time else ""
        used = f"used {each.last_use_time:%Y-%m-%d %H:%M:%S}, stays until {each.expire_time:%H:%M:%S}"
        table.add_row(f"Stored {each.kind}", f"{decimal(each.size_bytes)}, {used}{pin} UTC")
    return table


def _segments(session: Session) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("Epoch", "Step", "Slots", "Size"):
        table.add_column(name, justify="right")
    for each in session.segments:
        table.add_row(f"{each.epoch:,}", f"{each.step:,}", f"{each.slots:,}", decimal(each.size_bytes))
    return table
