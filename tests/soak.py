"""A soak: clients ask a store, managers and workers for as long as you like, while random faults are injected.

    python tests/soak.py --minutes 30 --clients 16 --json benchmarks/results/soak.json \\
        --plot benchmarks/results/soak.png

There are two lanes, each a worker with a manager of its own, on one store; all are real processes, the model is tiny
and seeded. Clients compare every token with the answer of an idle worker, cancel some answers, read some slowly, hold
conversations. A part is killed, stopped, cut off, slowed down, its clock is set wrong, the store is filled or emptied.
Only parts of the second lane are killed, so that the first lane's processes show what they take over the whole time.
The command fails when a promise is broken: a wrong token, an answer or a refusal that does not come in its time, a
status that nothing explains, memory or descriptors that grow, a gauge that does not come back to zero.
"""

import asyncio
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
from matplotlib.figure import Figure
from support.faults.injected import FAULTS
from support.faults.questions import solo_questions
from support.faults.random_load import Felt, RandomClient, Tally
from support.faults.stack import Stack, until

_MIB = 1 << 20
_SAMPLE_SECONDS = 1.0
# Share of the time after which memory must be flat.
_WARM_UP = 0.25
# A line through shorter runs says little of an hour.
_LEAST_MINUTES = 10.0
# Stored segments live for so long, see support/faults/stack.py, and prefixes for longer.
_EMPTY_SECONDS = 100.0
# Descriptors that come and go with connections.
_DESCRIPTORS = 24


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="How long.")
@click.option("--clients", type=click.IntRange(min=1), default=16, show_default=True, help="How many ask at once.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of questions, cancels and faults.")
@click.option("--slope", type=float, default=24.0, show_default=True, help="Most growth of memory, in MiB an hour.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw memory and descriptors here.")
def main(*, minutes: float, clients: int, seed: int, slope: float, out: Path | None, plot: Path | None) -> None:
    """Soak a system in faults; fail if a promise is broken."""
    with TemporaryDirectory(prefix="soak-") as folder:
        found, samples = asyncio.run(soak(Path(folder), minutes * 60, clients, seed))
    fits = {name: fit(samples, name, found["answers"]["asked"]) for name in ("manager 0", "worker 0")}
    for name, own in fits.items():
        if minutes >= _LEAST_MINUTES and own["mib_per_hour"] > slope:
            found["broken"].append(f"{name} grows by {own['mib_per_hour']} MiB an hour, more than {slope}")
        if own["descriptors_last"] > own["descriptors_first"] + _DESCRIPTORS:
            found["broken"].append(f"descriptors of {name}: {own['descriptors_first']}, {own['descriptors_last']}")
    result = {
        "settings": {"minutes": minutes, "clients": clients, "seed": seed, "slope": slope},
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processors": os.cpu_count(),
        },
        "memory": fits,
        **found,
        "ratios": {
            **{f"{name.replace(' ', '_')}_mib_per_hour": own["mib_per_hour"] for name, own in fits.items()},
            "answered": found["answers"]["answered"],
            "broken": len(found["broken"]),
        },
        "samples": samples,
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        draw(samples, fits, found["faults_at"], plot)
    click.echo(
        json.dumps({key: value for key, value in result.items() if key not in {"samples", "faults_at"}}, indent=1)
    )
    sys.exit(bool(found["broken"]))


async def soak(folder, seconds, clients, seed):
    """Run it all; return what happened and the samples, each with its time in seconds."""
    questions = await solo_questions(folder)
    tally, felt, samples, faults = Tally(), Felt(), [], []
    async with Stack(folder) as stack:
        began = time.monotonic()
        end = began + seconds
        sampling = asyncio.create_task(sample(stack, samples, began))
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                client = RandomClient(stack.lanes[number % 2], questions, f"{seed}-{number}", felt, tally)
                group.create_task(client.run(end))
            group.create_task(inject(stack, felt, random.Random(seed), end, faults, began))
        asked_seconds = time.monotonic() - began
        await stack.heal()
        left = {}
        try:
            await until(lambda: not stack.gauges(), "the gauges to be zero")
            await until(lambda: not stored(stack), "the managers to remember nothing", _EMPTY_SECONDS)
            await until(stack.redis.holds_nothing, "the store to be empty", _EMPTY_SECONDS)
        except AssertionError as error:
            tally.broken.append(str(error))
            left = {**stack.gauges(), **stored(stack)}
        # The memory at rest, too.
        await asyncio.sleep(3 * _SAMPLE_SECONDS)
        sampling.cancel()
    return {
        "seconds": round(asked_seconds, 1),
        "answers": {
            "asked": tally.asked,
            "answered": tally.answered,
            "cancelled": tally.cancelled,
            "asked_again": tally.retried,
            "resumed_turns": tally.resumed,
            "statuses": dict(sorted(tally.outcomes.items())),
        },
        "faults": dict(sorted(Counter(name for name, *_ in faults).items())),
        "gauges_left": left,
        "broken": tally.broken,
        "faults_at": faults,
    }, samples


async def inject(stack, felt, rng, end, faults, began):
    """Inject one fault after another, each for a while, with a while between them."""
    while time.monotonic() < end:
        await asyncio.sleep(rng.uniform(0.5, 3))
        fault = rng.choice(list(FAULTS.values()))
        lane = stack.lanes[1 if fault.kills else rng.randrange(2)]
        if fault.felt:
            felt.begin(lane.name)
        faults.append([fault.name, lane.name, round(time.monotonic() - began, 1)])
        try:
            async with fault.hold(stack, lane):
                await asyncio.sleep(rng.uniform(0.2, 4))
        finally:
            if fault.felt:
                felt.end(lane.name)


async def sample(stack, samples, began):
    """Note memory and descriptors of each process again and again."""
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        found = {"seconds": round(time.monotonic() - began, 1)}
        for (name, _), (resident, descriptors) in stack.usage().items():
            found[name] = [resident, descriptors]
        samples.append(found)


def stored(stack):
    """Return what managers remember to be in the store, if anything."""
    found = {f"{lane.name} manager store_bytes": lane.manager.metric("store_bytes") for lane in stack.lanes}
    return {name: value for name, value in found.items() if value}


def fit(samples, name, asked):
    """Return a process's growth after the warm-up, by a line through its samples, and its descriptors."""
    times = np.array([found["seconds"] for found in samples if name in found])
    resident, descriptors = np.array([found[name] for found in samples if name in found]).T
    warm = times >= times[-1] * _WARM_UP
    slope = float(np.polyfit(times[warm], resident[warm], 1)[0])
    return {
        "mib_per_hour": round(slope * 3600 / _MIB, 2),
        "kib_per_request": round(slope * float(times[-1]) / max(asked, 1) / 1024, 3),
        "mib_after_warm_up": round(float(resident[warm][0]) / _MIB, 1),
        "mib_at_end": round(float(resident[-1]) / _MIB, 1),
        "descriptors_first": int(descriptors[0]),
        "descriptors_most": int(descriptors.max()),
        "descriptors_last": int(descriptors[-1]),
    }


def draw(samples, fits, faults, path):
    """Draw memory and descriptors over time."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    memory, descriptors = figure.subplots(2, 1, sharex=True)
    for name in fits:
        minutes = [found["seconds"] / 60 for found in samples if name in found]
        label = f"{name}: {fits[name]['mib_per_hour']:+} MiB/hour after warm-up"
        memory.plot(minutes, [found[name][0] / _MIB for found in samples if name in found], label=label)
        descriptors.plot(minutes, [found[name][1] for found in samples if name in found], label=name)
    descriptors.vlines([at / 60 for *_, at in faults], 0, 2, colors="0.6", linewidth=0.5, label="faults")
    memory.set_ylabel("Resident memory (MiB)")
    memory.set_ylim(bottom=0)
    descriptors.set(xlabel="Minutes", ylabel="Open file descriptors", ylim=(0, None))
    memory.legend()
    descriptors.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
