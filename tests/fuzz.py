"""Broken input by the million, for what the tests try only some of.

    python tests/fuzz.py --json benchmarks/results/fuzz.json

Each decoder (segments, manifests of rows, of prefixes) runs under atheris in a process of its own, bounded in memory
and time; what each input makes it allocate is measured. Then calls of any content go to a manager with a Redis and a
worker with a tiny model: random fields, whole requests with some changes, bytes that are no message. Found is what no
caller may see: a crash, an exception or a status that is not of the tree of errors, an allocation above its bound, a
server that no longer answers. The command fails if anything is found. It needs Linux on x86-64 and redis-server.
"""

import asyncio
import json
import logging
import os
import platform
import random
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console
from rich.progress import Progress
from support.fuzzed_bytes import DECODERS
from support.fuzzed_calls import fuzz_calls, fuzzed_services
from support.processes import RedisProcess

_PACKAGES = ("atheris", "grpcio", "isal", "numpy", "protobuf", "pydantic", "redis", "torch")
# Answers of a worker take a pass of a model for each token, so it gets fewer of the calls.
_WORKER_SHARE = 0.02
# Calls before it is looked whether both servers go on.
_ROUND = 2000


@click.command()
@click.option("--inputs", type=click.IntRange(min=3), default=1_000_000, show_default=True, help="For all decoders.")
@click.option("--calls", type=click.IntRange(min=0), default=100_000, show_default=True, help="To both services.")
@click.option("--seconds", type=float, default=3600.0, show_default=True, help="Begin no further calls after so long.")
@click.option("--seed", type=click.IntRange(min=1), default=1, show_default=True, help="Seed of all that is random.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(*, inputs: int, calls: int, seconds: float, seed: int, out: Path | None) -> None:
    """Fuzz the decoders and the services; fail if anything is found."""
    logging.disable(logging.WARNING)  # Servers log what they refuse.
    began, console = time.monotonic(), Console()
    found = {
        "settings": {"inputs": inputs, "calls": calls, "seconds": seconds, "seed": seed},
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: version(name) for name in _PACKAGES},
        },
        "decoders": {},
    }
    each = -(-inputs // len(DECODERS))
    for name in DECODERS:
        with console.status(f"{name}: {each} inputs"):
            found["decoders"][name] = own = decoder(name, each, seed)
        console.print(f"{name}: {own['inputs']} inputs, {own['whole']} whole, {len(own['findings'])} findings")
    found["calls"] = own = asyncio.run(services(calls, seed, began + seconds))
    console.print(f"calls: {own['count']}, {len(own['findings'])} findings")
    parts = [*found["decoders"].values(), found["calls"]]
    found["findings"] = sum(len(part["findings"]) for part in parts)
    found["ratios"] = {
        "decoder_inputs": sum(part["inputs"] for part in found["decoders"].values()),
        "calls": own["count"],
        "findings": found["findings"],
        "peak_over_bound": max(part["peak_over_bound"] for part in found["decoders"].values()),
    }
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(found["findings"] > 0)


def decoder(name: str, count: int, seed: int) -> dict:
    """Run a decoder under atheris in a process of its own; return what it reports, or how it died."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="fuzz-") as folder:
        report, corpus, log = Path(folder, "report"), Path(folder, "corpus"), Path(folder, "log")
        corpus.mkdir()
        words = [sys.executable, "-m", "support.fuzz_decoder", name, str(count), str(seed), str(report), str(corpus)]
        places = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        with log.open("wb") as output:
            subprocess.run(words, env={**os.environ, "PYTHONPATH": places}, stdout=output, stderr=output, check=False)
        if report.exists():
            found = json.loads(report.read_text())
        else:
            told = log.read_text(errors="replace")[-2000:]
            crash = [
                path.read_bytes().hex()
                for path in corpus.iterdir()
                if path.name.startswith(("crash", "oom", "timeout"))
            ]
            finding = {"fault": told, "input": "".join(crash)}
            found = {"inputs": 0, "whole": 0, "peak_over_bound": 0.0, "findings": [finding]}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


async def services(calls: int, seed: int, end: float) -> dict:
    """Call a manager and a worker; return how often, with which answers, and what was found."""
    rng, began, done, findings = random.Random(seed), time.monotonic(), 0, []
    with TemporaryDirectory(prefix="fuzz-") as folder, Progress() as progress:
        redis = RedisProcess(Path(folder), "--maxmemory", "256mb")
        redis.start()
        try:
            async with fuzzed_services(redis) as fuzz:
                task = progress.add_task("calls", total=calls)
                while done < calls and time.monotonic() < end:
                    count = min(_ROUND, calls - done)
                    to_worker = int(count * _WORKER_SHARE)
                    findings += await fuzz_calls(fuzz, fuzz.managers, rng, count - to_worker)
                    findings += await fuzz_calls(fuzz, fuzz.workers, rng, to_worker)
                    done += count
                    try:
                        await fuzz.served()
                    except Exception as error:  # noqa: BLE001 - Whatever it is, it is what is looked for.
                        findings.append({"fault": f"no longer serves: {error!r}"})
                        break
                    progress.update(task, completed=done)
                answers = {}
                for (method, code), count in sorted(fuzz.answers.items()):
                    answers.setdefault(method, {})[code] = count
        finally:
            redis.stop()
    return {
        "count": done,
        "seconds": round(time.monotonic() - began, 1),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "answers": answers,
        "findings": findings,
    }


if __name__ == "__main__":
    main()
