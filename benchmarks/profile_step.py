"""Where the time of a decode step goes: over a full cache of the budget's size, equal budgets, and the default policy.

    python -m benchmarks.profile_step --model .models/smollm2-135m-instruct \
        --json benchmarks/results/profile_step.json

The cases are those of :mod:`benchmarks.decode`: ``limit`` is the loop over a full cache of the budget's size, which
never evicts; ``equal`` gives every KV head the same budget; ``budget`` is the default policy, which shares the budget
out by what was measured of the model; ``hf_full`` is transformers' own loop over the whole context. A run of a case
goes from one eviction of a row to the next row's. Runs are taken in turn, each once as it is and once with its parts
timed; a part's milliseconds are its share of the latter, of the median of the former.

``budget_over_X`` is the speed of ``budget`` over that of X, and ``equal_over_limit`` that of ``equal``.
``free_over_hf_full`` is what a cache would reach whose attention, appending and evictions took no time: the time of
``hf_full`` over that of the rest of ``limit``. Times are those of the calling thread: on a GPU, work shows where it is
waited for.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

import scissorhands.cache
import scissorhands.view
from benchmarks.batch import Batch
from benchmarks.decode import STEADY_STEPS, HuggingFace, headline, steps
from benchmarks.measuring import Steps, environment, interleaved, paired_ratio, shares, write_results
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.evaluation.loading import load
from scissorhands.grant import PolicyRequest, grant, grant_text
from scissorhands.layer_pool import LayerPool
from scissorhands.probe import model_shape
from scissorhands.profile import Profile
from scissorhands.view import StepView
from scissorhands_server.heap import keep_large_blocks

# What a step is made of, in the order of the table, beside the "model"; a part is without the parts within it.
PARTS: Steps = {
    # Products with the model's weights.
    "weights": ((torch.nn.Linear, "forward"),),
    # Where the new tokens go.
    "places": ((scissorhands.view, "places_of"),),
    "append": ((LayerPool, "append"), (DynamicCache, "update")),
    # Scores, softmax, sums of values, and evidence.
    "attention": ((StepView, "attend"), (torch.nn.functional, "scaled_dot_product_attention")),
    "snapshot": ((ResidentCache, "snapshot"),),
    "plan": ((scissorhands.cache, "plan"),),
    # Copies of what goes and moves of what stays, and the rest of an eviction.
    "compaction": ((scissorhands.cache, "evict"),),
    "eviction": ((ResidentCache, "prepare_decode"),),
    "sampling": ((torch.Tensor, "argmax"),),
}
# What has nothing to do with what the cache holds.
_REST = ("weights", "model", "sampling", "other")


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--context", type=int, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--budget", type=float, default=0.2, show_default=True, help="Share of them that is kept.")
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8), show_default=True, help="Repeatable.")
@click.option("--rounds", type=int, default=12, show_default=True, help="Measured runs of each case.")
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(
    *, model: str, context: int, budget: float, batches: tuple[int, ...], rounds: int, quick: bool, out: Path | None
) -> None:
    """Tell where the time of a decode step goes."""
    torch.set_num_threads(1)
    keep_large_blocks()  # As a worker does.
    before = environment()
    if quick:
        rounds = 3
    ours, _ = load(model, "auto", "auto")
    theirs, _ = load(model, "auto", "auto")
    theirs.set_attn_implementation("sdpa")
    shape, slots = model_shape(ours), int(budget * context)
    share, profile = BudgetRequest.fraction(budget), Profile.find(model)
    grants = {
        "limit": grant(BudgetRequest.tokens(slots), PolicyRequest("full"), shape, slots),
        "equal": grant(share, PolicyRequest("scissorhands", "uniform"), shape, context),
        "budget": grant(share, PolicyRequest("scissorhands"), shape, context, profile),
    }
    parts: Steps = {**PARTS, "model": ((type(ours), "forward"),)}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for count in batches:
        # As many steps as there are from one row's eviction to the next row's.
        periods = {case: max(STEADY_STEPS, own.parameters.drop // count) for case, own in grants.items()}
        cases: dict[str, Callable[[], object]] = {
            case: partial(steps, Batch(ours, own, count, slots if case == "limit" else context), count, periods[case])
            for case, own in grants.items()
        }
        cases["hf_full"] = HuggingFace(theirs, count, context).run
        with torch.inference_mode():
            took = interleaved(cases, rounds, f"{count} rows")
            goes = profiles(cases, rounds, parts)
        seconds = {case: [each / periods.get(case, STEADY_STEPS) for each in own] for case, own in took.items()}
        found = [
            {
                "batch": count,
                "case": case,
                "step_seconds": median(own),
                "parts": {part: goes[case].get(part, 0.0) * median(own) for part in (*parts, "other")},
            }
            for case, own in seconds.items()
        ]
        rows += found
        ratios |= {f"{name}_{count}": value for name, value in ratios_of(seconds, goes["limit"]).items()}
        _show(found, count)
    ratios |= headline(ratios, batches)
    for name, ratio in ratios.items():
        click.echo(f"{name} {ratio:.3f}")
    settings = {
        "model": model, "context": context, "budget": budget, "slots": slots, "rounds": rounds, "batches": batches,
        "grants": {case: grant_text(own) for case, own in grants.items()}, "by_head": grants["budget"].by_head,
        "synthetic_caches": True, "dtype": str(ours.dtype),
    }  # fmt: skip
    write_results(out, settings, before, ratios, rows=rows)


def profiles(cases: Mapping[str, Callable[[], object]], rounds: int, parts: Steps) -> dict[str, dict[str, float]]:
    """Return which share of each case each part takes, the mean of runs that are taken in turn."""
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in track(range(rounds), description="parts", transient=True):
        for case, work in cases.items():
            runs[case].append(shares(work, parts))
    return {
        case: {part: fmean(run.get(part, 0.0) for run in own) for part in (*parts, "other")}
        for case, own in runs.items()
    }


def ratios_of(seconds: Mapping[str, list[float]], limit: Mapping[str, float]) -> dict[str, float]:
    """Return the ratios that the module's text tells of, from seconds of steps and the shares of ``limit``."""
    rest = sum(limit[part] for part in _REST)
    return {
        "budget_over_limit": paired_ratio(seconds["limit"], seconds["budget"]),
        "equal_over_limit": paired_ratio(seconds["limit"], seconds["equal"]),
        "budget_over_hf_full": paired_ratio(seconds["hf_full"], seconds["budget"]),
        "free_over_hf_full": paired_ratio(seconds["hf_full"], seconds["limit"]) / rest,
    }


def _show(rows: list[dict[str, Any]], count: int) -> None:
    table = Table("ms a step", *(row["case"] for row in rows), title=f"{count} rows")
    for part in rows[0]["parts"]:
        table.add_row(part, *(f"{1e3 * row['parts'][part]:.2f}" for row in rows))
    table.add_row("all", *(f"{1e3 * row['step_seconds']:.2f}" for row in rows))
    Console().print(table)


if __name__ == "__main__":
    main()
