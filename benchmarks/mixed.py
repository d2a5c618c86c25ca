"""Long prompts among short ones: how steadily tokens come while others' prompts are read.

    python -m benchmarks.mixed --model .models/smollm2-135m-instruct --text .texts/emma.txt \
        --json benchmarks/results/mixed.json --plot benchmarks/results/mixed.png

Clients ask a worker, each for one answer after the other, with prompts whose lengths are spread evenly on a logarithmic
scale and mixed, all under a budget of 20 %, with a manager. Then the same worker is asked the same once more, one
answer at a time: the run fails if an answer is another one then. ``p99_over_median`` is that of the times from one
token of an answer to the next.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from benchmarks.measuring import environment, save_plot, write_results
from benchmarks.serving import Answer, answer, manager, worker_process
from scissorhands_client import Budget, GenerateOptions
from scissorhands_server.store.embedded import EmbeddedStore

_STORE_BYTES = 1 << 30


@click.command()
@click.option("--model", required=True, help="A folder.")
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path), help="Of the prompts.")
@click.option("--clients", type=int, default=16, show_default=True, help="Clients, and rows of the worker.")
@click.option("--requests", type=int, default=1, show_default=True, help="Answers that each client asks for.")
@click.option("--shortest", type=int, default=50, show_default=True, help="Tokens of the shortest prompt.")
@click.option("--longest", type=int, default=3000, show_default=True, help="Tokens of the longest prompt.")
@click.option("--answer", "new", type=int, default=64, show_default=True, help="Tokens of an answer.")
@click.option("--budget", type=float, default=0.2, show_default=True, help="Share of the sequence that is kept.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
def main(
    *,
    model: str,
    text: Path,
    clients: int,
    requests: int,
    shortest: int,
    longest: int,
    new: int,
    budget: float,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure how steadily tokens come while others' prompts are read."""
    before = environment()
    ids = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))["input_ids"]
    lengths = spread(shortest, longest, clients * requests)
    if len(ids) < sum(lengths):
        raise click.ClickException(f"the text has {len(ids)} tokens, and the prompts take {sum(lengths)}")
    starts = np.cumsum([0, *lengths]).tolist()
    prompts = [ids[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    options = GenerateOptions(max_new_tokens=new, budget=Budget.fraction(budget), ignore_eos=True, prefix_cache=False)
    found = asyncio.run(measure(model, prompts, options, clients))
    ratios = found.pop("ratios")
    settings = {
        "model": model, "text": text.name, "clients": clients, "requests": requests, "shortest": shortest,
        "longest": longest, "answer": new, "budget": budget,
    }  # fmt: skip
    console = Console()
    for name, value in {**ratios, **found["figures"]}.items():
        console.print(f"{name} {value:.4g}")
    write_results(out, settings, before, ratios, **found)
    save_plot(draw(found["gaps"]), plot)


def spread(shortest: int, longest: int, count: int) -> list[int]:
    """Return lengths from the shortest to the longest, evenly on a logarithmic scale, mixed the same way each time."""
    lengths = np.geomspace(shortest, longest, count).round().astype(int)
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


async def measure(model: str, prompts: Sequence[list[int]], options: GenerateOptions, clients: int) -> dict[str, Any]:
    """Measure, and return the ``ratios``, other ``figures``, and the seconds between tokens, answer by answer.

    Raises:
        ClickException: An answer depends on what else the worker did.
    """
    store = EmbeddedStore(_STORE_BYTES)
    await store.start()
    try:
        async with (
            manager(store.url) as address,
            worker_process(model, "--manager", address, "--rows", str(clients)) as served,
        ):
            with Progress(transient=True) as progress:
                bar = progress.add_task("Together, then alone", total=2 * len(prompts))

                async def asked(prompt: list[int]) -> Answer:
                    found = await answer(served, prompt, options)
                    progress.advance(bar)
                    return found

                async def client(own: Sequence[list[int]]) -> list[Answer]:
                    return [await asked(prompt) for prompt in own]

                each = await asyncio.gather(*(client(prompts[index::clients]) for index in range(clients)))
                alone = [await client(prompts[index::clients]) for index in range(clients)]
    finally:
        await store.stop()
    together = [one for own in each for one in own]
    if [one.tokens for one in together] != [one.tokens for own in alone for one in own]:
        raise click.ClickException("an answer depends on what else the worker does")
    return summary(together)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what stands for answers that were given together."""
    gaps = [np.diff(one.times) for one in answers]
    all_ = np.concatenate(gaps)
    took = max(one.times[-1] for one in answers) - min(one.began for one in answers)
    middle = float(np.median(all_))
    return {
        "ratios": {
            "p99_over_median": round(float(np.percentile(all_, 99)) / middle, 3),
            "longest_over_median": round(float(all_.max()) / middle, 3),
        },
        "figures": {
            "median_seconds": round(middle, 4),
            "p99_seconds": round(float(np.percentile(all_, 99)), 4),
            "first_token_median_seconds": round(median(one.first for one in answers), 3),
            "tokens_per_second": round(sum(len(one.tokens) for one in answers) / took, 2),
        },
        "gaps": [np.round(own, 4).tolist() for own in gaps],
    }


def draw(gaps: Sequence[Sequence[float]]) -> Figure:
    """Draw which share of the times between tokens is longer than any time."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    all_ = np.sort(np.concatenate(gaps))
    axes.plot(all_, 1 - np.arange(len(all_)) / len(all_))
    axes.set_yscale("log")
    axes.set_xlabel("Seconds from one token of an answer to the next")
    axes.set_ylabel("Share that is longer")
    return figure


if __name__ == "__main__":
    main()
