"""What the store saves: resumed conversations and shared prefixes, with two workers, a manager and a Valkey here.

    python -m benchmarks.offload --model .models/smollm2-135m-instruct --text .texts/emma.txt --json offload.json

For every setting, a first turn of ``--tokens`` tokens is held with one worker. Turns of 16 tokens follow, with the two
workers in turn; each is resumed from the store, and read anew for comparison by a request of no session, in one run.
Times are the client's, from the request to the first token. Bytes in the store are ``MEMORY USAGE`` of all keys of the
session, segments apart. Throughput is that of a row as large as the full one, see :mod:`benchmarks.row_transfer`.
Then prompts that begin alike are answered: see :mod:`benchmarks.prefixes`.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import click
import torch
from redis.asyncio import Redis

from benchmarks import prefixes
from benchmarks.measuring import environment
from benchmarks.row_transfer import throughput
from benchmarks.serving import Served, ask, figures, manager, worker
from scissorhands.probe import probe
from scissorhands_client import Budget, GenerateOptions
from scissorhands_server.heap import keep_large_blocks
from scissorhands_server.store.embedded import EmbeddedStore
from scissorhands_server.worker.loading import LoadedModel, load

# The setting whose ratios stand for all.
HEADLINE = "budget_20_4bit"
TURN_TOKENS = 16
ANSWER_TOKENS = 4
# Times that a row goes to the store and back.
TRANSFERS = 15
_STORE_BYTES = 1 << 30

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """A budget and a format to measure."""

    name: str
    budget: Budget
    codec: str
    policy: str = "scissorhands"


SETTINGS = (
    Setting("full", Budget.fraction(1.0), "none", "full"),
    Setting("budget_20", Budget.fraction(0.2), "none"),
    Setting("budget_20_4bit", Budget.fraction(0.2), "turboquant:k4v4"),
)


@click.command()
@click.option("--model", required=True, help="A folder.")
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path), help="What is talked about.")
@click.option("--tokens", type=int, default=2000, show_default=True, help="Tokens of the first turn.")
@click.option("--turns", type=int, default=4, show_default=True, help="Turns after the first; 0: none.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Shared beginnings; 0 leaves them out.")
@click.option("--setting", "names", multiple=True, help="Only these settings; repeatable.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    *, model: str, text: Path, tokens: int, turns: int, rounds: int, names: tuple[str, ...], out: Path | None
) -> None:
    """Measure what it is worth to keep caches in the store."""
    torch.set_num_threads(1)
    measured_on = environment()
    keep_large_blocks()  # As a worker does, which are here in this process.
    loaded = load(model, cache_folder=Path(mkdtemp()))
    probe(loaded.model)
    ids = loaded.tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    rows, shared = asyncio.run(measure(loaded, ids, tokens, turns, rounds, names))
    ratios = all_ratios(rows, ratios_of) | all_ratios(shared, prefixes.ratios_of)
    click.echo(json.dumps(ratios, indent=1))
    if out:
        settings = {
            "model": model, "text": text.name, "tokens": tokens, "turns": turns, "turn_tokens": TURN_TOKENS,
            "answer_tokens": ANSWER_TOKENS, "rounds": rounds, "dtype": loaded.info.dtype,
        }  # fmt: skip
        content = {"settings": settings, "environment": measured_on, "ratios": ratios, "rows": rows, "prefixes": shared}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def all_ratios(rows: Rows, ratios_of_row: Callable[[dict[str, Any]], dict[str, float]]) -> dict[str, float]:
    """Return the ratios of every setting, its name behind theirs; those of the headline also without a name."""
    ratios = {}
    for row in rows:
        for name, value in ratios_of_row(row).items():
            ratios[f"{name}_{row['setting']}"] = round(value, 4)
            if row["setting"] == HEADLINE or name == "throughput_over_redis":
                ratios[name] = round(value, 4)
    return ratios


def ratios_of(row: dict[str, Any]) -> dict[str, float]:
    """Return what a setting's figures come to; of throughput that of the slower direction."""
    found = {
        "resume_over_recompute": row["recomputed_seconds"] / row["resumed_seconds"],
        "miss_overhead": row["miss_seconds"] / row["recomputed_seconds"],
        "bytes_full_over_stored": row["full_16bit_bytes"] / row["stored_bytes"],
    }
    if "suspend_bytes_per_second" in row:
        found["suspend_over_redis"] = row["suspend_bytes_per_second"] / row["redis_set_bytes_per_second"]
        found["resume_over_redis"] = row["resume_bytes_per_second"] / row["redis_get_bytes_per_second"]
        found["throughput_over_redis"] = min(found["suspend_over_redis"], found["resume_over_redis"])
    return found


async def measure(
    loaded: LoadedModel, ids: list[int], tokens: int, turns: int, rounds: int, names: tuple[str, ...]
) -> tuple[Rows, Rows]:
    """Measure the settings of these names, all if there are none; return the figures of conversations and prefixes."""
    store = EmbeddedStore(_STORE_BYTES)
    await store.start()
    try:
        async with manager(store.url) as address, worker(loaded, address) as one, worker(loaded, address) as two:
            redis = Redis.from_url(store.url)
            rows: Rows = []
            shared: Rows = []
            for setting in SETTINGS if turns else ():
                if not names or setting.name in names:
                    rows.append(await talk(setting, ids, tokens, turns, (one, two), redis))
                    if setting.name == "full":
                        rows[-1] |= await throughput(address, redis, loaded.info, rows[-1]["state_bytes"], TRANSFERS)
                        await redis.flushall()
                    click.echo(json.dumps(rows[-1]))
            for beginning in prefixes.BEGINNINGS if rounds else ():
                if not names or beginning.name in names:
                    shared.append(await prefixes.share(beginning, ids, rounds, (one, two)))
                    click.echo(json.dumps(shared[-1]))
                    await redis.flushall()
            await redis.aclose()
            return rows, shared
    finally:
        await store.stop()


async def talk(
    setting: Setting, ids: list[int], tokens: int, turns: int, workers: tuple[Served, Served], redis: Any
) -> dict[str, Any]:
    """Hold one conversation, and return what its turns took."""
    one, _ = workers
    prompt, next_ = ids[:tokens], tokens
    options = GenerateOptions(
        max_new_tokens=ANSWER_TOKENS,
        budget=setting.budget,
        policy=setting.policy,
        resident_codec=setting.codec,
        ignore_eos=True,
        prefix_cache=False,
    )
    kept_options = replace(options, session_id=setting.name)
    before = figures(one)
    answer, first_seconds, kept = await ask(one, prompt, kept_options)
    miss_seconds = figures(one)["resume_seconds_sum"] - before["resume_seconds_sum"]
    row: dict[str, Any] = {
        "setting": setting.name, "first_turn_seconds": first_seconds, "miss_seconds": miss_seconds,
        "state_bytes": kept.cache.suspended_bytes, "stored_bytes": await stored_bytes(redis, setting.name),
        # The last token of an answer is in no cache.
        "full_16bit_bytes": kept.cache.full_16bit_bytes,
        "resumed_tokens": [], "resumed": [], "recomputed": [],
    }  # fmt: skip
    for turn in range(turns):
        prompt = [*prompt, *answer, *ids[next_ : next_ + TURN_TOKENS]]
        next_ += TURN_TOKENS
        served = workers[(turn + 1) % 2]
        if turn < 2:  # noqa: PLR2004 - Reading anew takes long and varies little.
            _, seconds, _ = await ask(served, prompt, replace(options, max_new_tokens=1))
            row["recomputed"].append(seconds)
        resumed = figures(served)["resumed_tokens_total"]
        answer, seconds, _ = await ask(served, prompt, kept_options)
        row["resumed"].append(seconds)
        row["resumed_tokens"].append(figures(served)["resumed_tokens_total"] - resumed)
    row["resumed_seconds"], row["recomputed_seconds"] = median(row["resumed"]), median(row["recomputed"])
    await redis.flushall()
    return row


async def stored_bytes(redis: Any, session_id: str) -> int:
    """Return what the store takes for a session's row, by its own account."""
    keys = [key async for key in redis.scan_iter(f"*/{session_id}}}:suspended:*")]
    return sum([await redis.memory_usage(key, samples=0) for key in keys])


if __name__ == "__main__":
    main()
