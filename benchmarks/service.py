"""Tokens per second through the service, with the manager near and far, against a loop in this process.

    python -m benchmarks.service --model .models/smollm2-135m-instruct --text .texts/emma.txt \
        --json benchmarks/results/service.json --plot benchmarks/results/service.png

A manager with its store, and two workers that it serves, run as processes of their own; one of the workers has it 20 ms
away in each direction. ``--rows`` clients ask a worker for greedy answers to prompts of ``--context`` tokens, under a
budget of a fifth of them. The loop decodes the same rows under the same grant, and has neither service nor manager: it
computes its own plans, and drops what it evicts.

First, each worker reads the prompts anew. Of that round are ``prefill_stall_share`` (the part of the time to the first
token that prompts waited for plans, manager far) and the tokens of all answers, which must be the loop's. Then each
answers them again and again, in turn with the loop, from the stored prefixes. Tokens per second are the clients': those
that came while all rows decoded. ``service_over_loop`` and ``service_over_loop_20ms`` are medians of ratios of
neighbors; ``stall_share`` is the part of that time that decoding waited for plans, by the workers' own account.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.delay_proxy import DelayProxy
from benchmarks.measuring import environment, paired_ratio, save_plot, write_results
from benchmarks.serving import Answer, Served, answer, figures, manager, worker_process
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape, probe
from scissorhands.step import ModelStep
from scissorhands_client import Budget, GenerateOptions
from scissorhands_server.heap import keep_large_blocks
from scissorhands_server.store.embedded import EmbeddedStore
from scissorhands_server.worker.loading import LoadedModel, load

FAR_SECONDS = 0.02
_STORE_BYTES = 1 << 30
# So large that all prompts have been read when decoding begins, as in the loop.
_STEP_TOKENS = "65536"
# So often is a round asked again whose answers, all short, came one after the other.
_TRIES = 5


class Loop:
    """Rows in this process that decode greedily, without end.

    Args:
        loaded: The model.
        granted: The grant of every row.
        prompts: Their prompts, which it reads.
    """

    def __init__(self, loaded: LoadedModel, granted: Grant, prompts: Sequence[Sequence[int]]) -> None:
        model = loaded.model
        self._step = ModelStep(model)
        self._cache = ResidentCache(model_shape(model), model.dtype, model.device, statistics=loaded.statistics)
        self._rows = [self._cache.add_row(granted) for _ in prompts]
        self.answers: list[list[int]] = []
        with torch.inference_mode():
            for row, prompt in zip(self._rows, prompts, strict=True):
                while row.step < len(prompt):
                    tokens = row.next_chunk(len(prompt) - row.step)
                    self._cache.prepare_prefill(row, tokens)
                    logits = self._step([row], [prompt[row.step : row.step + tokens]])
                self.answers.append([int(logits.argmax())])

    @torch.inference_mode()
    def decode(self, tokens: int) -> float:
        """Decode some tokens of every row; return tokens per second."""
        began = perf_counter()
        for _ in range(tokens):
            for row in self._rows:
                self._cache.prepare_decode(row)
            logits = self._step(self._rows, [own[-1:] for own in self.answers])
            for own, token in zip(self.answers, logits.argmax(dim=-1).tolist(), strict=True):
                own.append(token)
        return tokens * len(self._rows) / (perf_counter() - began)


@dataclass
class Case:
    """A worker, and what was measured of it."""

    served: Served
    prompts: Sequence[Sequence[int]]
    options: GenerateOptions
    tokens_per_second: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)

    async def cold(self, *, store: bool) -> tuple[list[list[int]], float]:
        """Let it read the prompts anew, and store prefixes or not.

        Returns:
            The answers, and of the time to their first tokens the share that prompts waited for plans.
        """
        before = figures(self.served)
        answers = await self._ask(replace(self.options, prefix_cache=store))
        stalled = figures(self.served)["prefill_stall_seconds_total"] - before["prefill_stall_seconds_total"]
        return [each.tokens for each in answers], stalled / sum(each.first for each in answers)

    async def measure(self) -> list[list[int]]:
        """Let it answer once more, and return the answers."""
        for _ in range(_TRIES):
            before = figures(self.served)
            answers = await self._ask(self.options)
            if overlap(answers):
                break
        stalled = figures(self.served)["decode_stall_seconds_total"] - before["decode_stall_seconds_total"]
        tokens, seconds = together(answers)
        self.tokens_per_second.append(tokens / seconds)
        self.stalls.append(stalled / seconds)
        return [each.tokens for each in answers]

    async def _ask(self, options: GenerateOptions) -> list[Answer]:
        return await asyncio.gather(*(answer(self.served, prompt, options) for prompt in self.prompts))


def overlap(answers: Sequence[Answer]) -> tuple[float, float] | None:
    """Return when the last of some answers began to come and when the first was whole, if in this order."""
    start, end = max(each.times[0] for each in answers), min(each.times[-1] for each in answers)
    return (start, end) if start < end else None


def together(answers: Sequence[Answer]) -> tuple[int, float]:
    """Return how many tokens came while all answers were under way, and how many seconds that took.

    Raises:
        ClickException: They never were.
    """
    times = overlap(answers)
    if times is None:
        raise click.ClickException("an answer ended before another began: ask for longer ones (--answer)")
    start, end = times
    return sum(start < time <= end for each in answers for time in each.times), end - start


@click.command()
@click.option("--model", required=True, help="A folder.")
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path), help="Of the prompts.")
@click.option("--rows", type=int, default=8, show_default=True, help="Clients, and rows of the loop.")
@click.option("--context", type=int, default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--answer", "new", type=int, default=128, show_default=True, help="Tokens of an answer.")
@click.option("--budget", type=float, default=0.2, show_default=True, help="Share of the prompt that is kept.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Answers of each client that are measured.")
@click.option("--quick", is_flag=True, help="Few rounds of short answers.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the results here, as PNG.")
def main(
    *,
    model: str,
    text: Path,
    rows: int,
    context: int,
    new: int,
    budget: float,
    rounds: int,
    quick: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure the service against a loop."""
    torch.set_num_threads(1)
    keep_large_blocks()  # As a worker does.
    before = environment()
    if quick:
        rounds, new = min(rounds, 3), min(new, 48)
    loaded = load(model, cache_folder=Path(mkdtemp()))
    probe(loaded.model)
    ids = loaded.tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    prompts = [ids[start : start + context] for start in range(0, rows * context, context)]
    if len(prompts[-1]) < context:
        raise click.ClickException(f"the text has {len(ids)} tokens, and {rows} prompts take {rows * context}")
    slots = int(budget * context)
    found = asyncio.run(measure(model, loaded, prompts, slots, new, rounds))
    settings = {
        "model": model, "text": text.name, "rows": rows, "context": context, "answer": new, "budget": slots,
        "rounds": rounds, "far_seconds": FAR_SECONDS, "dtype": loaded.info.dtype,
    }  # fmt: skip
    _show(found)
    write_results(out, settings, before, found["ratios"], tokens_per_second=found["tokens_per_second"])
    if plot:
        save_plot(draw(found["tokens_per_second"]), plot)


async def measure(
    model: str, loaded: LoadedModel, prompts: Sequence[list[int]], slots: int, new: int, rounds: int
) -> dict[str, Any]:
    """Measure, and return ``ratios`` and each case's tokens per second, round by round.

    Raises:
        ClickException: An answer depends on where it was made.
    """
    options = GenerateOptions(max_new_tokens=new, budget=Budget.tokens(slots), ignore_eos=True)
    rows = ("--rows", str(len(prompts)), "--step-tokens", _STEP_TOKENS)
    store = EmbeddedStore(_STORE_BYTES)
    await store.start()
    try:
        async with (
            manager(store.url) as address,
            DelayProxy(int(address.rpartition(":")[2]), FAR_SECONDS) as proxy,
            worker_process(model, "--manager", address, *rows) as near_worker,
            worker_process(model, "--manager", f"127.0.0.1:{proxy.port}", *rows) as far_worker,
        ):
            near, far = (Case(served, prompts, options) for served in (near_worker, far_worker))
            near_answers, near_stall = await near.cold(store=True)
            far_answers, far_stall = await far.cold(store=False)
            granted = grant(
                BudgetRequest.tokens(slots), PolicyRequest("scissorhands"), model_shape(loaded.model),
                len(prompts[0]) + new, loaded.profile,
            )  # fmt: skip
            # In threads, since the proxy must go on meanwhile.
            loop = await asyncio.to_thread(Loop, loaded, granted, prompts)
            await asyncio.to_thread(loop.decode, new - 1)
            answers = [list(each) for each in loop.answers]
            tokens: list[float] = []
            with Progress(transient=True) as progress:
                for _ in progress.track(range(rounds)):
                    tokens.append(await asyncio.to_thread(loop.decode, new))
                    near_answers += await near.measure()
                    far_answers += await far.measure()
    finally:
        await store.stop()
    if any(each != answers[index % len(prompts)] for index, each in enumerate([*near_answers, *far_answers])):
        raise click.ClickException("a worker's answer is not that of the loop")
    ratios = {
        "service_over_loop": paired_ratio(near.tokens_per_second, tokens),
        "service_over_loop_20ms": paired_ratio(far.tokens_per_second, tokens),
        "stall_share": max(*near.stalls, *far.stalls),
        "prefill_stall_share": far_stall,
        "prefill_stall_share_near": near_stall,
    }
    return {
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "tokens_per_second": {"loop": tokens, "near": near.tokens_per_second, "far": far.tokens_per_second},
    }


def _show(found: dict[str, Any]) -> None:
    table = Table("Case", "Tokens a second")
    for case, tokens in found["tokens_per_second"].items():
        table.add_row(case, f"{median(tokens):.1f}")
    console = Console()
    console.print(table)
    for name, ratio in found["ratios"].items():
        console.print(f"{name} {ratio:.4f}")


def draw(tokens: dict[str, list[float]]) -> Figure:
    """Draw the tokens per second of each case, round by round."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for case, own in tokens.items():
        axes.plot(range(1, len(own) + 1), own, marker=".", label=case)
    axes.set_xlabel("Round")
    axes.set_ylabel("Tokens per second, all rows")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
