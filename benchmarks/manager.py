"""How many plans one core of a manager makes, how soon, and what a session costs it.

    python -m benchmarks.manager --json benchmarks/results/manager.json --plot benchmarks/results/manager.png

A manager runs as a process of its own, on one core; simulated workers on the others open sessions and send snapshots of
random evidence, by default those of 30 layers with 3 KV heads of 410 slots. Of every number of sessions, with a manager
that has just been started, it measures

- the plans per second of :data:`ROWS` rows that ask for one plan after the other;
- the time from when a plan was due until it came, with plans due at random times (a Poisson process) at each of
  :data:`LOADS`, as shares of that rate, so that waiting for others counts;
- the manager's memory before the sessions and after them, their attention, which is kept within a bound to measure
  persistence, included.

At last it asks the manager for :data:`OVERLOAD` times as many plans as it can make, counts what is turned away, and
then measures at half the load again.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measuring import environment, save_plot, write_results
from benchmarks.serving import program
from benchmarks.simulated_workers import PLANNED, SHED, Asked, Fleet, fleet, outcomes
from scissorhands.v1 import model_pb2
from scissorhands_server.store.embedded import EmbeddedStore
from scissorhands_server.top.scrape import scrape

ROWS = 32
LOADS = (0.5, 0.8)
OVERLOAD = 2.0
_LEASE_SECONDS = 120.0
_STORE_BYTES = 256 << 20
_READY = r"metrics on http://(\S+)/metrics\s+manager ready on (\S+)"


@dataclass(frozen=True)
class Case:
    """What is asked of a manager.

    Args:
        model: The model of all sessions.
        slots: Budget of a session, in tokens.
        workers: Workers that the sessions are spread over.
        seconds: How long each figure is measured.
        core: The processor that the manager runs on.
    """

    model: model_pb2.ModelInfo
    slots: int
    workers: int
    seconds: float
    core: int


@click.command()
@click.option("--sessions", type=int, multiple=True, default=(1, 100, 1000, 5000), show_default=True)
@click.option("--layers", type=int, default=30, show_default=True, help="Layers of the model.")
@click.option("--kv-heads", type=int, default=3, show_default=True, help="KV heads of a layer.")
@click.option("--slots", type=int, default=410, show_default=True, help="Slots of a KV head.")
@click.option("--workers", type=int, default=4, show_default=True, help="Workers, each with a connection of its own.")
@click.option("--seconds", type=float, default=15.0, show_default=True, help="How long each figure is measured.")
@click.option("--core", type=int, default=0, show_default=True, help="Processor that the manager runs on.")
@click.option("--quick", is_flag=True, help="Two seconds a figure.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
def main(
    *,
    sessions: tuple[int, ...],
    layers: int,
    kv_heads: int,
    slots: int,
    workers: int,
    seconds: float,
    core: int,
    quick: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure a manager with simulated workers."""
    if core not in os.sched_getaffinity(0):
        raise click.BadParameter(f"must be one of {sorted(os.sched_getaffinity(0))}", param_hint="--core")
    before = environment()
    if quick:
        seconds = min(seconds, 2.0)
    model = model_pb2.ModelInfo(
        name="simulated", fingerprint="f" * 64, dtype="float32", layers=layers, query_heads=kv_heads,
        kv_heads=kv_heads, head_dim=64, max_positions=1 << 20, element_bytes=4,
    )  # fmt: skip
    case = Case(model, slots, workers, seconds, core)
    with only_on(os.sched_getaffinity(0) - {core} or {core}):
        rows = [
            asyncio.run(measure(case, count, overload=count == max(sessions)))
            for count in track(sorted(sessions), "Sessions", transient=True)
        ]
    ratios = ratios_of(rows)
    show(rows, ratios)
    settings = {
        "sessions": sessions, "layers": layers, "kv_heads": kv_heads, "slots": slots, "workers": workers,
        "seconds": seconds, "rows": ROWS, "overload": OVERLOAD,
    }  # fmt: skip
    write_results(out, settings, before, ratios, rows=rows)
    save_plot(draw(rows), plot)


async def measure(case: Case, sessions: int, *, overload: bool) -> dict[str, Any]:
    """Measure a manager that has just been started with a number of sessions."""
    async with started(case, sessions) as (address, memory):
        empty = memory()
        all_ = await fleet(address, sessions, case.workers, case.model, case.slots)
        renewals = [asyncio.create_task(worker.renew(_LEASE_SECONDS / 4)) for worker in all_.workers]
        try:
            # Every session has been planned once before memory is read.
            for _ in range(-(-sessions // 16)):
                turns = [all_.next() for _ in range(min(16, sessions))]
                await asyncio.gather(*(worker.ask(session, all_.evidences) for worker, session in turns))
            full = memory()
            found: dict[str, Any] = {"sessions": sessions, "snapshot_bytes": all_.evidences.bytes}
            found["bytes_a_session"] = round((full - empty) / sessions)
            planned = outcomes(await all_.saturate(ROWS, case.seconds))[PLANNED]
            found["plans_per_second"] = round(planned / case.seconds, 1)
            found["loads"] = [await loaded(all_, case, found["plans_per_second"], load) for load in LOADS]
            if overload:
                found["overload"] = await loaded(all_, case, found["plans_per_second"], OVERLOAD)
                found["recovered"] = await loaded(all_, case, found["plans_per_second"], LOADS[0])
        finally:
            for task in renewals:
                task.cancel()
            await asyncio.gather(*renewals, return_exceptions=True)
            await asyncio.gather(*(worker.close() for worker in all_.workers))
    return found


async def loaded(all_: Fleet, case: Case, capacity: float, load: float) -> dict[str, Any]:
    """Measure how soon plans come if so large a share of what can be made is asked for."""
    asked = await all_.arrive(capacity * load, case.seconds)
    return {"load": load, "asked": len(asked), **latency(asked)}


def latency(asked: Sequence[Asked]) -> dict[str, Any]:
    """Return what became of plans, and the median and the 99th percentile of those that came, in seconds."""
    seconds = [each.seconds for each in asked if each.result == PLANNED]
    counts = outcomes(asked)
    p50, p99 = (round(float(at), 5) for at in np.percentile(seconds, (50, 99))) if seconds else (None, None)
    return {PLANNED: counts[PLANNED], SHED: counts[SHED], "p50_seconds": p50, "p99_seconds": p99}


@asynccontextmanager
async def started(case: Case, sessions: int) -> AsyncIterator[tuple[str, Callable[[], float]]]:
    """Run a manager on one core; yield its address, and what returns the bytes of its memory."""
    async with AsyncExitStack() as stack:
        store = EmbeddedStore(_STORE_BYTES)
        await store.start()
        stack.push_async_callback(store.stop)
        options = ("--store-url", store.url, "--max-sessions", str(2 * sessions), "--lease", str(_LEASE_SECONDS))
        with only_on({case.core}):
            ready = await stack.enter_async_context(program(_READY, "manager", *options))
        yield ready[2], lambda: scrape(ready[1]).total("process_resident_memory_bytes")


@contextmanager
def only_on(cores: set[int]) -> Iterator[None]:
    """Run this process, and those that it starts, on some processors only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what stands for the run: the worst of all numbers of sessions."""
    last = rows[-1]
    at_load = [row["loads"][-1] for row in rows]
    ratios = {
        "plans_per_second": min(row["plans_per_second"] for row in rows),
        "p99_over_p50": round(max(load["p99_seconds"] / load["p50_seconds"] for load in at_load), 3),
        "shed_below_80_percent": round(max(load[SHED] / load["asked"] for load in at_load), 5),
        "bytes_a_session": last["bytes_a_session"],
    }
    if "overload" in last:
        over, after, usual = last["overload"], last["recovered"], last["loads"][0]
        ratios["overload_shed_share"] = round(over[SHED] / over["asked"], 4)
        ratios["overload_plans_over_capacity"] = round(over[PLANNED] * OVERLOAD / over["asked"], 4)
        ratios["recovered_p50_over_usual"] = round(after["p50_seconds"] / usual["p50_seconds"], 3)
    return ratios


def show(rows: Sequence[dict[str, Any]], ratios: dict[str, float]) -> None:
    """Print the results."""
    table = Table("Sessions", "Plans a second", *(f"p50, p99 at {load:.0%}, ms" for load in LOADS), "KiB a session")
    for row in rows:
        times = [f"{1e3 * load['p50_seconds']:.1f}, {1e3 * load['p99_seconds']:.1f}" for load in row["loads"]]
        kib = f"{row['bytes_a_session'] / 1024:.0f}"
        table.add_row(f"{row['sessions']:,}", f"{row['plans_per_second']:.0f}", *times, kib)
    console = Console()
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name} {ratio:g}")


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw how soon plans come, by load and number of sessions."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['sessions']:,}" for row in rows]
    for index, load in enumerate(LOADS):
        for key, style in (("p50_seconds", "-"), ("p99_seconds", "--")):
            times = [1e3 * row["loads"][index][key] for row in rows]
            axes.plot(names, times, style, marker=".", color=f"C{index}", label=f"{key[:3]} at {load:.0%} of the load")
    axes.set_xlabel("Sessions")
    axes.set_ylabel("Milliseconds until a plan came")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
