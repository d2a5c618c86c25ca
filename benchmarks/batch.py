"""Tokens per second of a batch at equal KV memory: a full cache against a budget, exact and in 4 bits.

    python -m benchmarks.batch --model .models/smollm2-135m-instruct --json benchmarks/results/batch.json \
        --plot benchmarks/results/batch.png

Memory for keys, values and evidence is what ``--full-rows`` full sequences of ``--length`` tokens take in transformers'
own cache. The full cache runs so many rows in it; a budget runs as many as fit, every byte of theirs counted. A step is
what a worker does between two rounds of sampling: room is made in every row (snapshot, plan and eviction, when one is
due; rows are spread evenly over the time from one eviction to the next), one token is decoded in each, and the most
likely next one is taken. The full cache is measured at its full length.

Caches are filled with random keys and values, the same in every row, which take as long as any others. Steps of all
cases are run in turn. ``tokens_at_equal_memory`` is the median, over rounds, of the budget's tokens per second over the
full cache's; ``tokens_at_equal_memory_4bit`` is that of resident 4-bit slots. Where the time of a step goes is told by
timing its parts.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import environment, interleaved, paired_ratio, save_plot, shares, write_results
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.codec.statistics import attached
from scissorhands.evaluation.loading import load
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerPool
from scissorhands.probe import model_shape
from scissorhands.row import Row
from scissorhands.step import ModelStep
from scissorhands.view import StepView
from scissorhands_server.heap import keep_large_blocks

_SEED = 0
SIZES = (1, 2, 4, 8, 16, 32, 64)
# What a step spends its time on, as far as it is told apart; the rest is norms, rotations, sampling and Python.
STEPS: dict[str, tuple[tuple[Any, str], ...]] = {
    "weights": ((torch.nn.Linear, "forward"),),
    "attention": ((StepView, "attend"),),
    "eviction": ((ResidentCache, "prepare_decode"),),
}


class Batch:
    """Rows of one grant in a cache of their own, filled with random numbers.

    Args:
        model: The model.
        granted: The grant of every row.
        count: How many rows.
        length: Tokens that each has seen.
    """

    def __init__(self, model: Any, granted: Grant, count: int, length: int) -> None:
        self._step = ModelStep(model)
        self._cache = ResidentCache(model_shape(model), model.dtype, model.device, statistics=attached(model))
        self._full = max(granted.layer_slots) >= length
        self._length = length
        self.grant = granted
        self.rows = [self._cache.add_row(granted) for _ in range(count)]
        self._tokens = [[index + 100] for index in range(count)]
        generator = torch.Generator(model.device).manual_seed(_SEED)
        pool = self.rows[0].pool
        for layer in pool.layers:
            _fill(layer, model_shape(model).head_dim, length, generator)
        spread = granted.parameters.drop / count
        for index, row in enumerate(self.rows):
            self._place(row, 1 if self._full else 1 + int(index * spread))

    @property
    def bytes(self) -> int:
        """Bytes that its rows allocate, measured on their storages."""
        return self._cache.allocated_bytes()

    def step(self, count: int) -> None:
        """Decode a token in each of the first ``count`` rows."""
        rows = self.rows[:count]
        for row in rows:
            if self._full:
                self._place(row, 1)
            self._cache.prepare_decode(row)
        logits = self._step(rows, self._tokens[:count])
        for own, token in zip(self._tokens, logits.argmax(dim=-1).tolist(), strict=False):
            own[0] = token

    def _place(self, row: Row, free: int) -> None:
        """Let a row have seen all its tokens but one, and have some free slots in every layer."""
        row.lengths = [slots - free for slots in row.grant.layer_slots]
        row.step = self._length - 1


def _fill(layer: Any, head_dim: int, length: int, generator: torch.Generator) -> None:
    """Fill a layer of all rows alike; their slots hold tokens of the whole length."""
    if not isinstance(layer, LayerPool):
        raise click.ClickException("layers that slide take the same memory at any budget; choose another model")
    rows, heads, slots = layer.positions.shape
    for tensor, side in ((layer.keys, 0), (layer.values, 1)):
        exact = torch.randn(heads, slots, head_dim, generator=generator, device=tensor.device)
        tensor.copy_(exact if layer.codec is None else layer.codec[side].encode_rows(exact))
    layer.positions.copy_(torch.linspace(0, length - 2, slots).int())
    layer.states[0].copy_(torch.rand(rows, heads, slots, generator=generator, device=generator.device))


@click.command()
@click.option("--model", required=True, help="A folder or a hub id.")
@click.option("--length", type=int, default=2048, show_default=True, help="Tokens of a sequence.")
@click.option("--full-rows", type=int, default=4, show_default=True, help="Full sequences whose memory there is.")
@click.option("--budget", type=float, default=0.2, show_default=True, help="Share of the length that is kept.")
@click.option("--policy", default="scissorhands:uniform", show_default=True, help="Policy of the budget.")
@click.option("--codec", default="int4", show_default=True, help="Format of the resident 4-bit slots.")
@click.option("--size", "sizes", type=int, multiple=True, default=SIZES, show_default=True, help="Batch; repeatable.")
@click.option("--rounds", type=int, default=24, show_default=True, help="Measured steps of each case.")
@click.option("--quick", is_flag=True, help="Few rounds and batch sizes.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
def main(
    *,
    model: str,
    length: int,
    full_rows: int,
    budget: float,
    policy: str,
    codec: str,
    sizes: tuple[int, ...],
    rounds: int,
    quick: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure a batch at equal KV memory."""
    torch.set_num_threads(1)
    keep_large_blocks()  # As a worker does.
    before = environment()
    if quick:
        rounds, sizes = 3, tuple(size for size in sizes if size in (1, 4, 16))
    loaded, _ = load(model, "auto", "auto")
    shape = model_shape(loaded)
    name, _, preset = policy.partition(":")
    share, chosen = BudgetRequest.fraction(budget), PolicyRequest(name, preset)
    grants = {
        "full": grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), shape, length),
        "budget": grant(share, chosen, shape, length),
        "4bit": grant(share, chosen, shape, length, codec=codec),
    }
    memory = full_rows * shape.full_bytes(length)
    fitting = {case: full_rows if case == "full" else memory // own.bytes for case, own in grants.items()}
    with torch.inference_mode():
        made = {
            case: Batch(loaded, own, fitting[case] if case == "full" else max(fitting[case], *sizes), length)
            for case, own in grants.items()
        }
        at_limit = interleaved(
            {case: partial(batch.step, fitting[case]) for case, batch in made.items()}, rounds, "equal memory"
        )
        curves = _curves(made, fitting, sizes, max(3, rounds // 3))
        goes = {case: shares(partial(batch.step, fitting[case]), STEPS) for case, batch in made.items()}
    tokens = {case: [fitting[case] / taken for taken in seconds] for case, seconds in at_limit.items()}
    ratios = {
        "tokens_at_equal_memory": paired_ratio(tokens["budget"], tokens["full"]),
        "tokens_at_equal_memory_4bit": paired_ratio(tokens["4bit"], tokens["full"]),
    }
    rows = [
        {
            "case": case,
            "rows": fitting[case],
            "row_bytes": batch.grant.bytes,
            "bytes": batch.grant.bytes * fitting[case],
            "allocated_bytes_a_row": batch.bytes / len(batch.rows),
            "step_seconds": median(at_limit[case]),
            "tokens_per_second": median(tokens[case]),
            "shares": goes[case],
        }
        for case, batch in made.items()
    ]
    _show(rows, ratios)
    settings = {
        "model": model, "length": length, "full_rows": full_rows, "budget": budget, "policy": policy, "codec": codec,
        "sizes": sizes, "rounds": rounds, "dtype": str(loaded.dtype), "memory_bytes": memory, "synthetic_caches": True,
        "seed": _SEED,
    }  # fmt: skip
    write_results(out, settings, before, ratios, rows=rows, curves=curves)
    if plot:
        save_plot(draw(rows, curves), plot)


def _curves(
    made: dict[str, Batch], fitting: dict[str, int], sizes: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """Measure each case at each batch size; the full cache as far as its memory goes."""
    found = []
    for size in sizes:
        cases: dict[str, Callable[[], object]] = {
            case: partial(batch.step, size) for case, batch in made.items() if size <= len(batch.rows)
        }
        for case, seconds in interleaved(cases, rounds, f"{size} rows").items():
            found.append(
                {
                    "case": case,
                    "rows": size,
                    "fits": size <= fitting[case],
                    "step_seconds": median(seconds),
                    "tokens_per_second": size / median(seconds),
                }
            )
    return found


def _show(rows: list[dict[str, Any]], ratios: dict[str, float]) -> None:
    table = Table("Cache", "Rows", "MB a row", "ms a step", "Tokens a second", "Where a step's time goes")
    for row in rows:
        goes = sorted(row["shares"].items(), key=lambda item: -item[1])
        table.add_row(
            row["case"],
            str(row["rows"]),
            f"{row['row_bytes'] / 1e6:.1f}",
            f"{1e3 * row['step_seconds']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            ", ".join(f"{name} {share:.0%}" for name, share in goes),
        )
    console = Console()
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name} {ratio:.2f}")


def draw(rows: list[dict[str, Any]], curves: list[dict[str, Any]]) -> Figure:
    """Draw tokens per second over the batch size; a larger mark where the memory ends."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        own = sorted(
            {each["rows"]: each["tokens_per_second"] for each in [*curves, row] if each["case"] == row["case"]}.items()
        )
        [line] = axes.plot(*zip(*own, strict=True), marker=".", label=row["case"])
        axes.plot(row["rows"], row["tokens_per_second"], marker="o", markersize=10, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("Rows of a step (circles: as many as fit into the same memory)")
    axes.set_ylabel("Tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
