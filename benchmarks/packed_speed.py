"""Decoding with packed slots against exact ones, at equal slots: interleaved steps of one model, as ratios of medians.

    python -m benchmarks.packed_speed --model .models/smollm2-135m-instruct --slots 512 --json packed_speed.json

A row of random keys is filled to its budget, and one token after the other is decoded in turn by every format. Nothing
is evicted while it is measured: eviction gathers packed rows, which are fewer bytes. The planner's budgets by head are
compared to exact slots with the same budgets by head.
"""

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.progress import track

from benchmarks.measuring import environment, write_results
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.codec.statistics import attached
from scissorhands.evaluation.loading import load
from scissorhands.formats import EXACT
from scissorhands.grant import PLANNED, PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.profile import Profile
from scissorhands.step import ModelStep

_SEED = 0


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--slots", type=int, multiple=True, default=[512, 4096], show_default=True, help="Repeatable.")
@click.option("--compression", type=float, multiple=True, default=[5.0, 20.0], show_default=True, help="Repeatable.")
@click.option("--length", type=int, default=2048, show_default=True, help="Tokens that the planner plans for.")
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
    *,
    model: str,
    slots: tuple[int, ...],
    compression: tuple[float, ...],
    length: int,
    rows: int,
    steps: int,
    codecs: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure decoding with packed slots."""
    before = environment()
    loaded, _ = load(model, "auto", "auto")
    shape, policy = model_shape(loaded), PolicyRequest("scissorhands")
    cases = {
        str(size): {name: grant(BudgetRequest.tokens(size), policy, shape, codec=name) for name in (EXACT, *codecs)}
        for size in slots
    }
    for factor in compression:
        budget, profile = BudgetRequest.compression(factor), Profile.find(model)
        planned = grant(budget, policy, shape, length, profile, PLANNED)
        cases[f"{factor:g}x"] = {EXACT: replace(planned, codecs=()), PLANNED: planned}
    ratios, lines = {}, []
    for case, grants in cases.items():
        times = measure(loaded, case, grants, rows, steps)
        for codec, seconds in times.items():
            ratio = median(times[EXACT]) / median(seconds)
            held = sum(grants[codec].layer_slots) / len(grants[codec].layer_slots)
            lines.append(
                {
                    "case": case,
                    "codec": codec,
                    "mean_slots": held,
                    "step_seconds": median(seconds),
                    "speed_over_exact": ratio,
                }
            )
            click.echo(
                f"{case:>6} {held:8.0f} slots  {codec:18} {1000 * median(seconds):8.1f} ms a step  {ratio:.2f} of exact"
            )
            if codec != EXACT:
                ratios[f"{codec}_{case}"] = ratio
    settings = {"model": model, "rows": rows, "steps": steps, "seed": _SEED, "length": length}
    write_results(out, settings, before, ratios, rows=lines)


@torch.inference_mode()
def measure(model: Any, case: str, grants: dict[str, Grant], count: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each format, taken in turn."""
    shape, step = model_shape(model), ModelStep(model)
    generator = torch.Generator().manual_seed(_SEED)
    rows = {}
    for codec, granted in grants.items():
        cache = ResidentCache(shape, model.dtype, model.device, statistics=attached(model))
        rows[codec] = [cache.add_row(granted) for _ in range(count)]
        for row in rows[codec]:
            row.lengths = [held - steps - 2 for held in granted.layer_slots]
            row.step = max(row.lengths)
        for layer in rows[codec][0].pool.layers:
            for vectors, side in ((layer.keys, 0), (layer.values, 1)):
                exact = torch.randn(*vectors.shape[:3], shape.head_dim, generator=generator).to(model.dtype)
                vectors.copy_(exact if layer.codec is None else layer.codec[side].encode_rows(exact))
    times: dict[str, list[float]] = {codec: [] for codec in grants}
    for index in track(range(steps + 1), description=case, transient=True):
        for codec, own in rows.items():
            began = time.perf_counter()
            step(own, [[index + 100]] * count)
            if index:  # The first one warms up.
                times[codec].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
