"""Workers and managers as tables for the terminal."""

from collections.abc import Sequence
from typing import TypeVar

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table

from scissorhands_server.top.look import Silent
from scissorhands_server.top.states import ManagerState, WorkerState

State = TypeVar("State", WorkerState, ManagerState)

_WORKER_COLUMNS = (
    *("model", "rows", "waiting", "slots", "cache", "compression"),
    *("tokens/s", "read/s", "evictions/s", "remote plans", "found", "manager"),
)
_MANAGER_COLUMNS = ("sessions", "plans/s", "ms a plan", "shed/s", "objects", "stored", "store's memory", "store")


def tables(workers: Sequence[WorkerState | Silent], managers: Sequence[ManagerState | Silent]) -> Group:
    """Return the tables of all servers; one that does not answer says so in its line."""
    shown = []
    for title, columns, states in (("worker", _WORKER_COLUMNS, workers), ("manager", _MANAGER_COLUMNS, managers)):
        if not states:
            continue
        table = Table(title, box=box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for state in states:
            table.add_row(state.endpoint, *_cells(state))
        shown.append(table)
    return Group(*shown)


def _cells(state: WorkerState | ManagerState | Silent) -> tuple[str, ...]:
    if isinstance(state, Silent):
        return (state.why,)
    if isinstance(state, WorkerState):
        return (
            state.model,
            f"{state.rows}/{state.rows_capacity}",
            str(state.queued),
            f"{state.slots:,}/{state.budget_slots:,}",
            decimal(state.allocated_bytes),
            _number(state.compression, "{:.1f}x"),
            f"{state.generated:.1f}",
            f"{state.read:.1f}",
            f"{state.evictions:.1f}",
            _number(state.remote_share, "{:.0%}"),
            _number(state.hit_share, "{:.0%}"),
            "up" if state.manager_up else "away",
        )
    most = f" of {decimal(state.store_most_bytes)}" if state.store_most_bytes else ""
    return (
        str(state.sessions),
        f"{state.plans:.1f}",
        _number(state.plan_seconds and 1e3 * state.plan_seconds, "{:.1f}"),
        f"{state.shed:.1f}",
        str(state.stored_objects),
        decimal(state.stored_bytes),
        decimal(state.store_memory_bytes) + most,
        "up" if state.store_up else "away",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
