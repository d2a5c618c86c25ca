"""Decoding with packed slots against exact ones, at equal slots: interleaved steps of one model, as ratios of medians.

    python benchmarks/packed_speed.py --model .models/smollm2-135m-instruct --slots 512 --json packed_speed.json

A row of random keys is filled to its budget, and one token after the other is decoded in turn by every format. Nothing
is evicted while it is measured: eviction gathers packed rows, which are fewer bytes.
"""

import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import transformers
from rich.progress import track

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.codec.statistics import attached
from scissorhands.evaluation.loading import load
from scissorhands.formats import EXACT
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.step import ModelStep

_SEED = 0


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--slots", type=int, multiple=True, default=[512, 4096], show_default=True, help="Repeatable.")
@click.option("--rows", type=int, default=1, show_default=True, help="Rows of a step.")
@click.option("--steps", type=int, default=24, show_default=True, help="Measured steps of each format.")
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    default=["int8", "int4", "int4-hadamard", "turboquant:k4v4", "klt:k4v4"],
    show_default=True,
    help="Compared to exact slots; repeatable.",
)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    *, model: str, slots: tuple[int, ...], rows: int, steps: int, codecs: tuple[str, ...], out: Path | None
) -> None:
    """Measure decoding with packed slots."""
    loaded, _ = load(model, "auto", "auto")
    ratios, lines = {}, []
    for size in slots:
        times = measure(loaded, size, rows, steps, (EXACT, *codecs))
        for codec, seconds in times.items():
            ratio = median(times[EXACT]) / median(seconds)
            lines.append({"codec": codec, "slots": size, "step_seconds": median(seconds), "speed_over_exact": ratio})
            click.echo(f"{size:6} slots  {codec:18} {1000 * median(seconds):8.1f} ms a step  {ratio:.2f} of exact")
            if codec != EXACT:
                ratios[f"{codec}_{size}"] = ratio
    if out:
        environment = {
            "torch": torch.__version__, "transformers": transformers.__version__, "platform": platform.platform(),
            "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        }  # fmt: skip
        settings = {"model": model, "rows": rows, "steps": steps, "seed": _SEED}
        content = {"settings": settings, "environment": environment, "ratios": ratios, "rows": lines}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(model: Any, slots: int, count: int, steps: int, codecs: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the seconds of each step of each format, taken in turn."""
    shape, step = model_shape(model), ModelStep(model)
    generator = torch.Generator().manual_seed(_SEED)
    rows = {}
    for codec in codecs:
        cache = ResidentCache(shape, model.dtype, model.device, statistics=attached(model))
        granted = grant(BudgetRequest.tokens(slots), PolicyRequest("h2o"), shape, codec=codec)
        rows[codec] = [cache.add_row(granted) for _ in range(count)]
        for row in rows[codec]:
            row.step = slots - steps - 2
            row.lengths = [row.step] * len(row.lengths)
        for layer in rows[codec][0].pool.layers:
            for vectors, side in ((layer.keys, 0), (layer.values, 1)):
                exact = torch.randn(*vectors.shape[:3], shape.head_dim, generator=generator).to(model.dtype)
                vectors.copy_(exact if layer.codec is None else layer.codec[side].encode_rows(exact))
    times: dict[str, list[float]] = {codec: [] for codec in codecs}
    for index in track(range(steps + 1), description=f"{slots} slots", transient=True):
        for codec in codecs:
            began = time.perf_counter()
            step(rows[codec], [[index + 100]] * count)
            if index:  # The first one warms up.
                times[codec].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
