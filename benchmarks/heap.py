"""What it brings that the servers' heap keeps large blocks: CPU time of prefill and decoding, with and without.

    python -m benchmarks.heap --model .models/smollm2-135m-instruct --text .texts/emma.txt --json heap.json

Runs of their own processes, in turn: the C library's settings cannot be taken back.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import click
import torch

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import probe
from scissorhands.step import ModelStep
from scissorhands.wire import model_shape
from scissorhands_server.heap import keep_large_blocks
from scissorhands_server.worker.loading import load

_CHUNK = 256
_NEW = 16


@click.command()
@click.option("--model", required=True, help="A folder.")
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path), help="What is read.")
@click.option("--chunks", type=int, default=3, show_default=True, help="Chunks of 256 tokens to read.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Runs of each kind.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the results here.")
@click.option("--one", type=bool, hidden=True, help="Measure once, in this process.")
def main(*, model: str, text: Path, chunks: int, rounds: int, out: Path | None, one: bool | None) -> None:
    """Measure what the heap's settings bring."""
    if one is not None:
        click.echo(json.dumps(measure(model, text, chunks, keep=one)))
        return
    rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(2 * rounds):
        keep = bool(number % 2)
        command = [sys.executable, "-m", "benchmarks.heap", *sys.argv[1:], "--one", str(keep)]
        rows[keep].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))  # noqa: S603 - us.
    ratios = {
        f"{name}_mapped_over_kept": round(median(r[name] for r in rows[False]) / median(r[name] for r in rows[True]), 4)
        for name in ("prefill", "decode")
    }
    click.echo(json.dumps(ratios, indent=1))
    if out:
        settings = {"model": model, "text": text.name, "chunk": _CHUNK, "chunks": chunks, "rounds": rounds}
        environment = {"torch": torch.__version__, "platform": platform.platform(), "cpus": os.cpu_count()}
        found = {"kept": rows[True], "mapped": rows[False]}
        content = {"settings": settings, "environment": environment, "ratios": ratios, "cpu_seconds": found}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(model: str, text: Path, chunks: int, *, keep: bool) -> dict[str, float]:
    """Return the CPU seconds of reading the chunks, and of decoding one token, the second time."""
    if keep:
        keep_large_blocks()
    torch.set_num_threads(1)
    loaded = load(model, cache_folder=Path(mkdtemp()))
    probe(loaded.model)
    length = chunks * _CHUNK
    ids = loaded.tokenizer(text.read_text(encoding="utf-8")[: length * 16])["input_ids"]
    shape, step = model_shape(loaded.info), ModelStep(loaded.model)
    granted = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), shape, length + _NEW)
    cache = ResidentCache(shape, loaded.model.dtype, loaded.model.device)
    found: dict[str, Any] = {}
    for _ in range(2):
        row = cache.add_row(granted)
        began = time.process_time()
        for start in range(0, length, _CHUNK):
            step([row], [ids[start : start + _CHUNK]])
        read = time.process_time()
        for at in range(length, length + _NEW):
            step([row], [ids[at : at + 1]])
        found = {"prefill": read - began, "decode": (time.process_time() - read) / _NEW}
        cache.remove_row(row)
    return found


if __name__ == "__main__":
    main()
