"""Tokens per second of decoding under a budget, against the limit, transformers' own loop and kvpress.

    python -m benchmarks.decode --model .models/smollm2-135m-instruct --json benchmarks/results/decode.json \
        --plot benchmarks/results/decode.png

What is compared, at each batch size, run after run in turn:

- ``budget``: what a worker does between two rounds of sampling, under ``--budget`` of ``--context`` tokens with the
  default policy: room is made in every row (snapshot, plan, eviction), and one token is decoded in each.
- ``limit``: the same loop over a full cache of just the budget's size, which never evicts.
- ``hf_budget``, ``hf_full``: transformers' own loop (DynamicCache, sdpa) at the budget's size, and at the context's.
- ``kvpress:PRESS@N``: kvpress's DecodingPress with the budget for its target, compressing every N tokens, in an
  environment of its own (:mod:`benchmarks.peers`) that waits while others run. N = 512 is its default; there its cache
  is measured at its mean size, without the compression itself, which is in its favor.

Caches are filled with random keys and values, which take as long as any others; kvpress compresses them for real. A
run of ``budget`` goes from one eviction to the next, or a multiple of that; so does a run of kvpress at N = 16. Ratios
are tokens per second of ``budget`` over those of another, the median of runs next to each other; those without a batch
size are the least of all. ``decode_over_kvpress`` is over the fastest of its cases.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from benchmarks.batch import Batch
from benchmarks.measuring import environment, interleaved, paired_ratio, save_plot, write_results
from benchmarks.peers.decoding import Decoding, describe
from benchmarks.peers.environment import prepare, versions
from scissorhands.budget import BudgetRequest
from scissorhands.evaluation.loading import load
from scissorhands.grant import PolicyRequest, grant, grant_text
from scissorhands.probe import model_shape
from scissorhands.profile import Profile
from scissorhands_server.heap import keep_large_blocks

# Steps of a run of what never evicts, by rows: enough of them to outweigh the clock, few enough to stay interleaved.
STEADY_STEPS = 4
_INTERVALS = (16, 512)
_SEED = 0


class HuggingFace:
    """transformers' own loop over a cache of a steady size.

    Args:
        model: The model, with its own attention.
        count: Rows.
        tokens: Tokens that each row has when a run is through.
    """

    def __init__(self, model: Any, count: int, tokens: int) -> None:
        self._model = model
        self._size = tokens - STEADY_STEPS
        self._cache = DynamicCache(config=model.config)
        self._tokens = torch.full((count, 1), 100)
        shape = model_shape(model)
        generator = torch.Generator().manual_seed(_SEED)
        for layer in range(shape.layers):
            size = (count, shape.kv_heads, self._size, shape.head_dim)
            keys, values = (torch.randn(size, generator=generator).to(model.dtype) for _ in range(2))
            self._cache.update(keys, values, layer)
        self.peak_bytes = 2 * shape.layers * count * shape.kv_heads * tokens * shape.head_dim * shape.element_bytes

    def run(self) -> None:
        """Decode some tokens in each row, and forget them."""
        for step in range(STEADY_STEPS):
            positions = torch.full_like(self._tokens, self._size + step)
            output = self._model(input_ids=self._tokens, position_ids=positions, cache=self._cache, use_cache=True)
            self._tokens = output.logits[:, -1].float().argmax(dim=-1, keepdim=True)
        self._cache.crop(-STEADY_STEPS)


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--context", type=int, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--budget", type=float, default=0.2, show_default=True, help="Share of them that is kept.")
@click.option("--policy", default="scissorhands", show_default=True, help="Policy of the budget.")
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8), show_default=True, help="Repeatable.")
@click.option("--press", "presses", multiple=True, default=("knorm",), show_default=True, help="kvpress's; repeatable.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Whether kvpress is measured.")
@click.option("--rounds", type=int, default=12, show_default=True, help="Measured runs of each case.")
@click.option("--quick", is_flag=True, help="Few rounds of the first batch size.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
def main(
    *,
    model: str,
    context: int,
    budget: float,
    policy: str,
    batches: tuple[int, ...],
    presses: tuple[str, ...],
    peers: bool,
    rounds: int,
    quick: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure decoding under a budget."""
    torch.set_num_threads(1)
    keep_large_blocks()  # As a worker does.
    console = Console()
    python = prepare(console) if peers else None
    before = environment() | ({"peers": versions()} if peers else {})
    if quick:
        rounds, batches = 3, batches[:1]
    ours, _ = load(model, "auto", "auto")
    theirs, _ = load(model, "auto", "auto")
    theirs.set_attn_implementation("sdpa")
    shape = model_shape(ours)
    name, _, preset = policy.partition(":")
    request, profile = PolicyRequest(name, preset), Profile.find(model)
    granted = grant(BudgetRequest.fraction(budget), request, shape, context, profile)
    slots = int(budget * context)
    whole = grant(BudgetRequest.tokens(slots), PolicyRequest("full"), shape, slots)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for count in batches:
        console.print(f"{count} rows", highlight=False)
        kept, limit = Batch(ours, granted, count, context), Batch(ours, whole, count, slots)
        small, full = HuggingFace(theirs, count, slots), HuggingFace(theirs, count, context)
        # As many steps as there are from one row's eviction to the next row's, and no fewer than others run.
        period = max(STEADY_STEPS, granted.parameters.drop // count)
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "budget": (partial(steps, kept, count, period), period),
            "limit": (partial(steps, limit, count, STEADY_STEPS), STEADY_STEPS),
            "hf_budget": (small.run, STEADY_STEPS),
            "hf_full": (full.run, STEADY_STEPS),
        }
        held = {
            "budget": kept.bytes, "limit": limit.bytes, "hf_budget": small.peak_bytes, "hf_full": full.peak_bytes,
        }  # fmt: skip
        tasks = [describe(press, every, slots, count, STEADY_STEPS) for press in presses for every in _INTERVALS]
        with Decoding(python, model, tasks) as decoding, torch.inference_mode():
            for task in tasks if python else ():
                cases[task["name"]] = partial(decoding.run, task["name"]), task["steps"]
                held[task["name"]] = decoding.peak_bytes[task["name"]]
            seconds = interleaved({case: work for case, (work, _) in cases.items()}, rounds, f"{count} rows")
        tokens = {case: [count * cases[case][1] / took for took in own] for case, own in seconds.items()}
        rows += [
            {
                "batch": count,
                "case": case,
                "step_seconds": count / median(own),
                "tokens_per_second": median(own),
                "peak_kv_bytes_a_row": held[case] / count,
            }
            for case, own in tokens.items()
        ]
        ratios |= {f"{name}_{count}": value for name, value in ratios_of(tokens).items()}
        ratios |= {f"kvpress_peak_over_budget_{count}": value for value in _swings(held)}
    ratios |= headline(ratios, batches)
    _show(console, rows, ratios)
    settings = {
        "model": model, "context": context, "budget": budget, "slots": slots, "policy": policy,
        "grant": grant_text(granted), "by_head": granted.by_head, "rounds": rounds, "batches": batches,
        "presses": presses if peers else (), "synthetic_caches": True, "dtype": str(ours.dtype), "seed": _SEED,
    }  # fmt: skip
    write_results(out, settings, before, ratios, rows=rows)
    if plot:
        save_plot(draw(rows, batches), plot)


def steps(batch: Batch, count: int, number: int) -> None:
    """Decode tokens in the first ``count`` rows."""
    for _ in range(number):
        batch.step(count)


def ratios_of(tokens: dict[str, list[float]]) -> dict[str, float]:
    """Return tokens per second of the budget over those of the other cases; of kvpress over its fastest case."""
    own = tokens["budget"]
    found = {
        f"decode_over_{case}": paired_ratio(own, other)
        for case, other in tokens.items()
        if case != "budget" and not case.startswith("kvpress")
    }
    peers = [paired_ratio(own, other) for case, other in tokens.items() if case.startswith("kvpress")]
    return found | ({"decode_over_kvpress": min(peers)} if peers else {})


def headline(ratios: dict[str, float], batches: Sequence[int]) -> dict[str, float]:
    """Return the least of each ratio over all batch sizes, under its name without one."""
    names = {name.rpartition("_")[0] for name in ratios}
    return {name: min(ratios[f"{name}_{count}"] for count in batches) for name in sorted(names)}


def _swings(held: dict[str, int]) -> list[float]:
    """Return the least peak of kvpress's cases over the budget's bytes, evidence included; nothing without kvpress."""
    peaks = [size for case, size in held.items() if case.startswith("kvpress")]
    return [min(peaks) / held["budget"]] if peaks else []


def _show(console: Console, rows: list[dict[str, Any]], ratios: dict[str, float]) -> None:
    table = Table("Rows", "Case", "ms a step", "Tokens a second", "Peak KV MB a row")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            row["case"],
            f"{1e3 * row['step_seconds']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['peak_kv_bytes_a_row'] / 1e6:.1f}",
        )
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name} {ratio:.3f}")


def draw(rows: list[dict[str, Any]], batches: Sequence[int]) -> Figure:
    """Draw the tokens per second of each case, a panel for each batch size."""
    figure = Figure(figsize=(5 * len(batches), 4.5), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, count in zip(panels, batches, strict=True):
        own = [row for row in rows if row["batch"] == count]
        axes.bar([row["case"] for row in own], [row["tokens_per_second"] for row in own])
        axes.tick_params(axis="x", rotation=45)
        axes.set_title(f"{count} rows" if count > 1 else "1 row")
    panels[0].set_ylabel("Tokens per second")
    return figure


if __name__ == "__main__":
    main()
