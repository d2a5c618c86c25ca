"""What policies cost: the share of a decode step that signals, snapshots, plans and compaction take.

    python benchmarks/policy_cost.py --model .models/smollm2-135m-instruct --json benchmarks/results/policy_cost.json

A row is filled with random tokens until it evicts. Each decode step is then timed with and without its signals
(repeating a pass does not observe), and evictions are timed apart, spread over the steps that they serve. Medians
over the steps; one row, since signals and plans grow with rows as attention does.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.evaluation.loading import load
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.profile import Profile
from scissorhands.row import Row
from scissorhands.step import ModelStep
from scissorhands.view import StepView

POLICIES = ("scissorhands", "scissorhands:uniform", "h2o", "tova", "snapkv", "scissorhands:counts", "streaming")
SEED = 0
# A prompt is read in pieces of this many tokens.
PIECE = 128


def timed(work: Callable[[], object]) -> float:
    """Return how long some work takes, in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fill(cache: ResidentCache, step: ModelStep, row: Row, tokens: list[int]) -> None:
    """Append tokens until the next one would evict."""
    while tokens and row.slack > 0:
        size = min(PIECE, row.slack, len(tokens))
        step([row], [tokens[:size]])
        del tokens[:size]
    cache.prepare_decode(row)


@torch.inference_mode()
def measure(model: Any, policy: str, slots: int, steps: int) -> dict[str, Any]:
    """Measure one policy at one budget."""
    name, _, preset = policy.partition(":")
    shape = model_shape(model)
    total = 5 * slots
    profile = Profile.find(model.name_or_path)
    granted = grant(BudgetRequest.tokens(slots), PolicyRequest(name, preset), shape, total, profile)
    cache, step = ResidentCache(shape, model.dtype, model.device), ModelStep(model)
    row = cache.add_row(granted)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(model.config.vocab_size, (total,), generator=generator).tolist()
    # Until every head has evicted, as in a long answer.
    while row.step < max(granted.layer_slots) + slots // 2 and tokens:
        fill(cache, step, row, tokens)
    observed, bare, evicting, evictions = [], [], [], 0
    for _ in track(range(steps), description=f"{policy} {slots}", transient=True):
        before = row.epoch
        evicting.append(timed(lambda: cache.prepare_decode(row)))
        evictions += row.epoch - before
        # A pass whose evidence is counted already gives the same answer; it is repeated with its signals right after.
        row.observed_layers = len(row.pool.layers)
        bare.append(timed(lambda: forward(model, row, tokens[0])))
        row.observed_layers = 0
        observed.append(timed(lambda: step([row], [[tokens.pop(0)]])))
    plan_seconds = sum(evicting) / steps
    signal_seconds = statistics.median(a - b for a, b in zip(observed, bare, strict=True))
    return {
        "policy": policy,
        "slots": slots,
        "by_head": granted.by_head,
        "step_seconds": statistics.median(observed),
        "signals_seconds": signal_seconds,
        "eviction_seconds_per_step": plan_seconds,
        "evictions": evictions,
        "share": (signal_seconds + plan_seconds) / statistics.median(observed),
    }


def forward(model: Any, row: Row, token: int) -> None:
    """Run one decode step and forget it: the row stays as it was."""
    view = StepView([row])
    model(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[row.step]]), cache=view, use_cache=True)


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--policy", "policies", multiple=True, default=POLICIES, show_default=True, help="Repeatable.")
@click.option("--slots", "budgets", multiple=True, type=int, default=(512, 4096), show_default=True, help="Repeatable.")
@click.option("--steps", default=64, show_default=True, help="Decode steps to time.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(model: str, policies: tuple[str, ...], budgets: tuple[int, ...], steps: int, out: Path | None) -> None:
    """Measure what policies cost of a decode step."""
    loaded, _ = load(model, "auto", "auto")
    rows = [measure(loaded, policy, slots, steps) for slots in budgets for policy in policies]
    table = Table("Policy", "Slots", "Step (ms)", "Signals (ms)", "Eviction (ms a step)", "Share of the step")
    for row in rows:
        numbers = (1e3 * row[name] for name in ("step_seconds", "signals_seconds", "eviction_seconds_per_step"))
        table.add_row(row["policy"], str(row["slots"]), *(f"{number:.2f}" for number in numbers), f"{row['share']:.1%}")
    Console().print(table)
    if out:
        environment = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
        ratios = {f"{row['policy']}_{row['slots']}": row["share"] for row in rows}
        settings = {"model": model, "steps": steps, "seed": SEED}
        content = {"settings": settings, "environment": environment, "ratios": ratios, "rows": rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
