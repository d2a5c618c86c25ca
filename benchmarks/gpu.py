"""Decoding on a GPU: first that it is right, then tokens per second and the share of the memory's bandwidth.

    benchmarks/gpu.sh
    benchmarks/gpu.sh --device cpu --small

Right means: a tiny model decodes under a budget on the device and on the processor, both in float32; the tokens must be
the same, but for ties, and the logits near to each other. Then a model of the shape of Llama-3-8B with random weights,
in bfloat16, decodes over caches of random keys and values, at contexts of 4,096 to 65,536 tokens and batches of 1 to 64
rows, as far as the memory goes: over a full cache and under a budget of a fifth, evictions included.

``eager`` is the budget without CUDA graphs, which there are on a GPU alone; ``captured_over_eager`` is the gain, the
least and the most. ``budget_over_full`` is tokens per second at equal rows, the least and the most over all contexts
and batches; ``tokens_at_equal_memory`` is that of the most rows that were measured of each in the memory of the full
cache's most rows, by context. ``bandwidth_share`` is the bytes that a step has to read at least (the weights once, and
the slots in use of every row), over its time, as a share of what a copy on the device reads and writes in that time.
Cells that the time (``--seconds``) does not allow are left out, and listed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.batch import Batch
from benchmarks.decode import steps
from benchmarks.measuring import environment, interleaved, paired_ratio, save_plot, write_results
from scissorhands import kernels
from scissorhands.budget import BudgetRequest, Grant, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape, probe
from scissorhands.step import ModelStep

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)  # fmt: skip
TINY = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=131072, tie_word_embeddings=False,
)  # fmt: skip
CONTEXTS, BATCHES = (4096, 16384, 65536), (1, 4, 16, 64)
SMALL_CONTEXTS, SMALL_BATCHES = (256, 512), (1, 4)
_BUDGET = 0.2
_SEED = 0
# Logits of the device and of the processor, both in float32, are sums in another order.
_TOLERANCE = 1e-3
# Of the device's memory, what is left for activations, fragments, and the copy of a layer while a pool grows.
_SPARE = 0.15
_GIB = 1 << 30


class Cell(NamedTuple):
    """What is measured together: equal rows at one context.

    Args:
        context: Tokens of a sequence.
        rows: Rows.
        with_full: Whether there is room for full caches, too.
    """

    context: int
    rows: int
    with_full: bool


@click.command()
@click.option("--device", default="cuda", show_default=True, help="As torch names it.")
@click.option("--small", is_flag=True, help="A tiny model, short contexts and few rows, to try it out.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Measured runs of each case.")
@click.option("--seconds", type=float, default=400.0, show_default=True, help="No cell is begun after this time.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
@torch.inference_mode()
def main(*, device: str, small: bool, rounds: int, seconds: float, out: Path | None, plot: Path | None) -> None:
    """Check and measure decoding on a GPU."""
    began = perf_counter()
    console, before = Console(), environment() | {"ran_on": device}
    place = torch.device(device)
    difference = check(place)
    console.print(f"as on the processor: logits differ by {difference:.2g} at most", highlight=False)
    bandwidth = copy_bandwidth(place, _GIB // 64 if small else 4 * _GIB)
    console.print(f"a copy moves {bandwidth / 1e9:.0f} GB/s", highlight=False)
    model = build(TINY if small else LLAMA_3_8B, place, torch.float32 if place.type == "cpu" else torch.bfloat16)
    shape = model_shape(model)
    weights = sum(each.nbytes for name, each in model.named_parameters() if "embed_tokens" not in name)
    room = _room(place, small=small)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for cell in cells(shape, room, SMALL_CONTEXTS if small else CONTEXTS, SMALL_BATCHES if small else BATCHES):
        if perf_counter() - began > seconds:
            skipped.append(f"{cell.context} tokens, {cell.rows} rows")
            continue
        rows += measure(model, shape, cell, rounds, weights, bandwidth)
        console.print(_line(rows, cell), highlight=False)
    ratios = ratios_of(rows)
    _show(console, rows, ratios)
    settings = {
        "model": "tiny" if small else "Llama-3-8B's shape, random weights", "dtype": str(model.dtype),
        "budget": _BUDGET, "rounds": rounds, "seed": _SEED, "synthetic_caches": True, "room_bytes": room,
        "copy_bytes_per_second": bandwidth, "weight_bytes": weights, "largest_logit_difference": difference,
        "skipped": skipped,
    }  # fmt: skip
    write_results(out, settings, before, ratios, rows=rows)
    if plot:
        save_plot(draw(rows), plot)


def build(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model with random weights, made on the device, with our attention."""
    torch.manual_seed(_SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: LlamaForCausalLM = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train(mode=False)
    probe(model)
    return model


@torch.inference_mode()
def check(device: torch.device, prompt: int = 96, new: int = 64) -> float:
    """Decode alike on the device and on the processor; return the largest difference of their logits.

    Raises:
        ClickException: A token differs that is no tie, or the logits are too far apart.
    """
    here = build(TINY, torch.device("cpu"), torch.float32)
    there = build(TINY, device, torch.float32)
    there.load_state_dict(here.state_dict())
    tokens = torch.randint(TINY.vocab_size, (prompt,), generator=torch.Generator().manual_seed(_SEED)).tolist()
    largest = 0.0
    for own, other in zip(_decode(here, tokens, new), _decode(there, tokens, new), strict=True):
        largest = max(largest, float((own - other).abs().max()))
        if largest > _TOLERANCE:
            raise click.ClickException(f"logits on {device} are {largest} away from those of the processor")
    return largest


def _decode(model: LlamaForCausalLM, prompt: Sequence[int], new: int) -> Iterator[torch.Tensor]:
    """Yield the logits after the prompt and after each new token, under a budget of a third of the prompt.

    Tokens go on by the position in the sequence, not by the logits: a tie would lead to another answer.
    """
    shape = model_shape(model)
    granted = grant(BudgetRequest.tokens(len(prompt) // 3), PolicyRequest("scissorhands", "uniform"), shape)
    cache, step = ResidentCache(shape, model.dtype, model.device), ModelStep(model)
    row = cache.add_row(granted)
    while row.step < len(prompt):
        size = row.next_chunk(len(prompt) - row.step)
        cache.prepare_prefill(row, size)
        yield step([row], [prompt[row.step : row.step + size]])
    for index in range(new):
        cache.prepare_decode(row)
        yield step([row], [[prompt[index % len(prompt)]]])


def copy_bandwidth(device: torch.device, size: int, rounds: int = 10) -> float:
    """Return the bytes per second that a copy reads and writes on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = []
    for _ in range(rounds + 1):
        began = perf_counter()
        target.copy_(source)
        _wait(device)
        took.append(perf_counter() - began)
    return 2 * size / median(took[1:])


def cells(shape: ModelShape, room: int, contexts: Sequence[int], batches: Sequence[int]) -> Iterator[Cell]:
    """Yield what fits into ``room`` bytes of caches, the cheap cells first."""
    for rows in batches:
        for context in contexts:
            kept, whole = (granted.bytes for granted in grants(shape, context))
            # With graphs and without them.
            if rows * 2 * kept <= room:
                yield Cell(context, rows, with_full=rows * (whole + 2 * kept) <= room)


def grants(shape: ModelShape, context: int) -> tuple[Grant, Grant]:
    """Return the grants of a budget and of a full cache."""
    return (
        grant(BudgetRequest.fraction(_BUDGET), PolicyRequest("scissorhands", "uniform"), shape, context),
        grant(BudgetRequest.tokens(context), PolicyRequest("full"), shape, context),
    )


def measure(
    model: LlamaForCausalLM, shape: ModelShape, cell: Cell, rounds: int, weights: int, bandwidth: float
) -> list[dict[str, Any]]:
    """Measure a cell; return a row of results for each case."""
    names = ["budget", *(["full"] if cell.with_full else []), *(["eager"] if kernels.capturable(model.device) else [])]
    granted = dict(zip(("budget", "full"), grants(shape, cell.context), strict=True))
    batches = {
        name: Batch(model, granted["full" if name == "full" else "budget"], cell.rows, cell.context) for name in names
    }
    # A run goes from one row's eviction to the next row's.
    period = max(4, granted["budget"].parameters.drop // cell.rows)
    work: dict[str, Callable[[], object]] = {
        name: partial(steps, own, cell.rows, period) for name, own in batches.items()
    }
    if "eager" in work:
        work["eager"] = patch.object(kernels, "capturable", return_value=False)(work["eager"])
    took = interleaved(work, rounds, f"{cell.context} tokens, {cell.rows} rows")
    tokens = {name: [cell.rows * period / seconds for seconds in own] for name, own in took.items()}
    return [
        {
            "context": cell.context,
            "rows": cell.rows,
            "case": name,
            "tokens_per_second": median(own),
            "over_full": paired_ratio(own, tokens["full"]) if "full" in tokens else None,
            "over_eager": paired_ratio(own, tokens["eager"]) if "eager" in tokens else None,
            "cache_bytes": batches[name].bytes,
            "bandwidth_share": (weights + batches[name].bytes) * median(own) / cell.rows / bandwidth,
        }
        for name, own in tokens.items()
    ]


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that stand for a run."""
    ratios = {"bandwidth_share_most": max(row["bandwidth_share"] for row in rows)}
    for name, column in (("budget_over_full", "over_full"), ("captured_over_eager", "over_eager")):
        over = [row[column] for row in rows if row["case"] == "budget" and row[column] is not None]
        if over:
            ratios |= {f"{name}_least": min(over), f"{name}_most": max(over)}
    for context in sorted({row["context"] for row in rows}):
        own = {
            case: [row for row in rows if (row["context"], row["case"]) == (context, case)]
            for case in ("budget", "full")
        }
        if not own["full"]:
            continue
        full = max(own["full"], key=lambda row: row["rows"])
        fitting = [row for row in own["budget"] if row["cache_bytes"] <= full["cache_bytes"]]
        best = max(row["tokens_per_second"] for row in fitting)
        ratios[f"tokens_at_equal_memory_{context}"] = best / full["tokens_per_second"]
    return ratios


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw tokens per second over the batch, a panel for each context."""
    contexts = sorted({row["context"] for row in rows})
    figure = Figure(figsize=(4 * len(contexts), 4), layout="constrained")
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        for case in dict.fromkeys(row["case"] for row in rows):
            own = _of(rows, context, case)
            axes.loglog([row["rows"] for row in own], [row["tokens_per_second"] for row in own], marker=".", label=case)
        axes.set_title(f"{context:,} tokens")
        axes.set_xlabel("Rows")
        axes.set_ylabel("Tokens per second")
        axes.legend(frameon=False)
    return figure


def _of(rows: Sequence[dict[str, Any]], context: int, case: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["context"], row["case"]) == (context, case)]


def _room(device: torch.device, *, small: bool) -> int:
    """Return the bytes that caches may take."""
    if device.type != "cuda":
        return _GIB // 64 if small else 4 * _GIB
    return int(torch.cuda.mem_get_info(device)[0] * (1 - _SPARE))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(rows: Sequence[dict[str, Any]], cell: Cell) -> str:
    own = [row for row in rows if (row["context"], row["rows"]) == (cell.context, cell.rows)]
    told = ", ".join(f"{row['case']} {row['tokens_per_second']:.1f}" for row in own)
    return f"{cell.context} tokens, {cell.rows} rows: {told} tokens a second"


def _show(console: Console, rows: Sequence[dict[str, Any]], ratios: dict[str, float]) -> None:
    table = Table("Context", "Rows", "Case", "Tokens a second", "Over full", "Of the bandwidth", "Cache GB")
    for row in rows:
        over = "" if row["over_full"] is None else f"{row['over_full']:.2f}"
        table.add_row(
            f"{row['context']:,}", str(row["rows"]), row["case"], f"{row['tokens_per_second']:.1f}", over,
            f"{row['bandwidth_share']:.2f}", f"{row['cache_bytes'] / 1e9:.2f}",
        )  # fmt: skip
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name} {ratio:.3f}")


if __name__ == "__main__":
    main()
