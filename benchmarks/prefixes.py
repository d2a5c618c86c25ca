"""Prompts that begin alike, with a stored prefix and without: a part of :mod:`benchmarks.offload`.

In every round, a prompt nobody has read is answered by one worker, which stores what it reads, and by the other without
prefixes, in turn first; what the first takes longer is the overhead of a miss. Then both answer prompts with the same
beginning and another question. Times are the client's, from the request to the first token; CPU time is that of both
workers and the client, until all is stored.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.serving import Served, ask, figures
from scissorhands_client import Budget, GenerateOptions

# Tokens of a question, behind the beginning that prompts share.
QUESTION_TOKENS = 16
ANSWER_TOKENS = 4
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Beginning:
    """A budget, a format and the length of a beginning.

    Args:
        name: Its name in the results.
        tokens: Tokens that prompts begin with in common.
        budget: The budget.
        codec: Format of resident slots.
        policy: The policy.
    """

    name: str
    tokens: int
    budget: Budget
    codec: str = "none"
    policy: str = "scissorhands"


# A fifth of 2,000 tokens. Its chunks are of 100 tokens, so 2,000 are a boundary; those of a full cache are of 256.
_FIFTH = Budget.tokens(400)
BEGINNINGS = (
    Beginning("full", 2048, Budget.fraction(1.0), policy="full"),
    Beginning("full_2000", 2000, Budget.fraction(1.0), policy="full"),
    Beginning("budget_20", 2000, _FIFTH),
    Beginning("budget_20_4bit", 2000, _FIFTH, "turboquant:k4v4"),
)


async def share(setting: Beginning, ids: list[int], rounds: int, workers: tuple[Served, Served]) -> dict[str, Any]:
    """Measure one setting and return its figures."""
    options = GenerateOptions(
        max_new_tokens=ANSWER_TOKENS,
        budget=setting.budget,
        policy=setting.policy,
        resident_codec=setting.codec,
        ignore_eos=True,
    )
    row: dict[str, Any] = {
        "setting": setting.name, "prefix_tokens": setting.tokens,
        "missed": [], "without": [], "missed_cpu": [], "without_cpu": [], "hit": [], "reused_tokens": [],
    }  # fmt: skip
    before = [figures(served) for served in workers]
    length = setting.tokens + 3 * QUESTION_TOKENS
    for number in range(rounds):
        own = ids[number * length : (number + 1) * length]
        shared, questions = own[: setting.tokens], own[setting.tokens :]
        prompts = [[*shared, *questions[at : at + QUESTION_TOKENS]] for at in range(0, len(questions), QUESTION_TOKENS)]
        one, two = workers if number % 2 else workers[::-1]
        for served, cached in ((one, True), (two, False))[:: -1 if number % 3 else 1]:
            began = time.process_time()
            _, seconds, _ = await ask(served, prompts[0], replace(options, prefix_cache=cached))
            await _stored(workers)
            name = "missed" if cached else "without"
            row[name].append(seconds)
            row[f"{name}_cpu"].append(time.process_time() - began)
        for served, prompt in zip((two, one), prompts[1:], strict=True):
            _, seconds, last = await ask(served, prompt, options)
            row["hit"].append(seconds)
            row["reused_tokens"].append(last.usage.prefix_tokens)
    after = [figures(served) for served in workers]
    moved = {
        name: sum(new[name] - old[name] for new, old in zip(after, before, strict=True))
        for name in ("prefix_store_bytes_total", "prefix_load_bytes_total")
    }
    return row | {
        "hit_seconds": median(row["hit"]),
        "missed_seconds": median(row["missed"]),
        "without_seconds": median(row["without"]),
        "overhead": _overhead(row["missed"], row["without"]),
        "cpu_overhead": _overhead(row["missed_cpu"], row["without_cpu"]),
        "stored_bytes": moved["prefix_store_bytes_total"] / rounds,
        "loaded_bytes": moved["prefix_load_bytes_total"] / len(row["hit"]),
    }


def ratios_of(row: dict[str, Any]) -> dict[str, float]:
    """Return what a setting's figures come to."""
    return {
        "prefix_hit_over_miss": row["missed_seconds"] / row["hit_seconds"],
        "prefix_miss_overhead": row["overhead"],
        "prefix_miss_cpu_overhead": row["cpu_overhead"],
    }


def _overhead(missed: list[float], without: list[float]) -> float:
    """Return what a miss takes more, as a share: of each round's own pair, so that a machine that slows down is out."""
    return median(one / other - 1 for one, other in zip(missed, without, strict=True))


async def _stored(workers: tuple[Served, Served]) -> None:
    """Wait until nothing is on its way to the store."""
    while any(figures(served)["suspension_held_bytes"] for served in workers):  # noqa: ASYNC110 - only metrics tell.
        await asyncio.sleep(_POLL_SECONDS)
