"""What policies cost: the share of a decode step that signals, snapshots, plans and compaction take.

    python -m benchmarks.policy_cost --model .models/smollm2-135m-instruct --json benchmarks/results/policy_cost.json

Random tokens are read, at most 512, and what they leave in the cache, keys, values and evidence, is repeated until
every head is full: what a step costs depends on how much a row holds, and only the search for similar keys (`r-kv`)
depends on what. `--read` reads tokens instead until every head has evicted, which takes minutes at 4,096 slots.

Decode steps are then timed, and what of them goes to the evidence. Evictions are timed apart, from snapshot to
compaction, and spread over the steps that they serve. One row, since signals and plans grow with rows as attention
does. Times are medians of what the thread takes of the CPU, so that other programs of the machine count for less.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measuring import environment, write_results
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.evaluation.loading import load
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerPool
from scissorhands.probe import model_shape
from scissorhands.profile import Profile
from scissorhands.row import Row
from scissorhands.step import ModelStep
from scissorhands.view import StepView

# All but those that never evict, or are there to compare with alone: the ring of `scissorhands:paper`.
POLICIES = (
    "scissorhands",
    "merged:scissorhands",
    "scissorhands:uniform",
    "scissorhands:counts",
    "h2o",
    "tova",
    "snapkv",
    "streaming",
    "fastgen",
    "expected-attention",
    "r-kv",
)
SEED = 0
# A prompt is read in pieces of this many tokens.
PIECE = 512


def timed(work: Callable[[], object]) -> float:
    """Return how long some work takes of the CPU, in seconds."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


class SignalClock:
    """What observing takes, in seconds, while :meth:`running`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add up what observing takes in here."""
        inner = LayerPool.observe

        def observe(*seen: Any) -> None:
            self.seconds += timed(lambda: inner(*seen))

        with patch.object(LayerPool, "observe", observe):
            yield


def fill(step: ModelStep, row: Row, tokens: list[int], slack: int = 0) -> None:
    """Append tokens until only ``slack`` more fit."""
    while row.slack > slack:
        size = min(PIECE, row.slack - slack)
        step([row], [tokens[:size]])
        del tokens[:size]


def repeat(row: Row) -> None:
    """Fill a row's slots by repeating those in use, as if that many tokens had been read and the oldest evicted."""
    slots = row.grant.layer_slots
    row.step = 2 * max(slots)
    for pool, own, length in zip(row.pool.layers, slots, row.lengths, strict=True):
        for tensor in pool.tensors():
            for start in range(length, own, length):
                tensor[row.index, :, start : start + length] = tensor[row.index, :, : min(length, own - start)]
        pool.positions[row.index] = torch.arange(row.step - own, row.step)
    row.lengths = list(slots)


def eviction_seconds(cache: ResidentCache, step: ModelStep, row: Row, tokens: list[int]) -> float:
    """Return what the next eviction takes, its snapshot included, spread over the steps from one to the next."""
    epoch, began = row.epoch, row.step
    fill(step, row, tokens, slack=row.grant.parameters.lookahead)
    seconds = timed(lambda: cache.prepare_decode(row))
    fill(step, row, tokens)
    seconds += timed(lambda: cache.prepare_decode(row))
    if row.epoch != epoch + 1:
        raise RuntimeError(f"{row.epoch - epoch} evictions in {row.step - began} tokens instead of one")
    return seconds / (row.step - began)


@torch.inference_mode()
def measure(model: Any, policy: str, slots: int, steps: int, evictions: int, *, read: bool) -> dict[str, Any]:
    """Measure one policy at one budget."""
    name, _, preset = policy.partition(":")
    shape = model_shape(model)
    total = 5 * slots
    profile = Profile.find(model.name_or_path)
    granted = grant(BudgetRequest.tokens(slots), PolicyRequest(name, preset), shape, total, profile)
    cache, step = ResidentCache(shape, model.dtype, model.device), ModelStep(model)
    row = cache.add_row(granted)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(model.config.vocab_size, (2 * total,), generator=generator).tolist()
    if read:
        # Until every head has evicted, as in a long answer.
        while row.step < max(granted.layer_slots) + slots // 8:
            fill(step, row, tokens)
            cache.prepare_decode(row)
    else:
        fill(step, row, tokens, slack=max(0, row.slack - PIECE))
        repeat(row)
        cache.prepare_decode(row)
    evicting = [eviction_seconds(cache, step, row, tokens) for _ in range(evictions)]
    stepping, observing = [], []
    for _ in track(range(steps), description=f"{policy} {slots}", transient=True):
        stepping.append(timed(lambda: forward(model, row, tokens[0])))
        row.observed_layers = 0
        clock = SignalClock()
        with clock.running():
            forward(model, row, tokens[0])
        row.observed_layers = 0
        observing.append(clock.seconds)
    eviction, signals = statistics.median(evicting), statistics.median(observing)
    whole = statistics.median(stepping) + eviction
    return {
        "policy": policy,
        "slots": slots,
        "by_head": granted.by_head,
        "step_seconds": whole,
        "signals_seconds": signals,
        "eviction_seconds_per_step": eviction,
        "share": (signals + eviction) / whole,
    }


def forward(model: Any, row: Row, token: int) -> None:
    """Run one decode step and forget it: the row stays as it was, but for its evidence."""
    view = StepView([row])
    model(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[row.step]]), cache=view, use_cache=True)


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--policy", "policies", multiple=True, default=POLICIES, show_default=True, help="Repeatable.")
@click.option("--slots", "budgets", multiple=True, type=int, default=(512, 4096), show_default=True, help="Repeatable.")
@click.option("--steps", default=64, show_default=True, help="Decode steps to time.")
@click.option("--evictions", default=8, show_default=True, help="Evictions to time.")
@click.option("--read", is_flag=True, help="Fill rows by reading alone.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(
    model: str,
    policies: tuple[str, ...],
    budgets: tuple[int, ...],
    steps: int,
    evictions: int,
    read: bool,
    out: Path | None,
) -> None:
    """Measure what policies cost of a decode step."""
    before = environment()
    loaded, _ = load(model, "auto", "auto")
    rows = [measure(loaded, policy, slots, steps, evictions, read=read) for slots in budgets for policy in policies]
    table = Table("Policy", "Slots", "Step (ms)", "Signals (ms)", "Eviction (ms a step)", "Share of the step")
    for row in rows:
        numbers = (1e3 * row[name] for name in ("step_seconds", "signals_seconds", "eviction_seconds_per_step"))
        table.add_row(row["policy"], str(row["slots"]), *(f"{number:.2f}" for number in numbers), f"{row['share']:.1%}")
    Console().print(table)
    ratios = {f"{row['policy']}_{row['slots']}": row["share"] for row in rows}
    settings = {"model": model, "steps": steps, "evictions": evictions, "seed": SEED, "read": read}
    write_results(out, settings, before, ratios, rows=rows)


if __name__ == "__main__":
    main()
