"""Which summary of evicted keys finds what the full cache attends to, for how many bytes.

A prompt with a pass key is read under a budget up to its last tokens. Their queries rank the blocks of 16 evicted slots
of each KV head by several summaries; the best are what a worker gets to choose from. What counts is how much of the
attention that the full cache's answer gives to evicted tokens lies on them.
Run it as ``python -m benchmarks.recall_summaries``.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scissorhands.cache import ResidentCache
from scissorhands.centroids import centroids_of
from scissorhands.eos import eos_ids
from scissorhands.evaluation.decoding import Decoder
from scissorhands.evaluation.recorder import interval_sums
from scissorhands.evaluation.request import Choice, Request
from scissorhands.evaluation.retrieval import KINDS, fact_of, hide
from scissorhands.evaluation.setup import Setup, prepare
from scissorhands.evaluation.texts import cuts_of, read_text
from scissorhands.recall import CANDIDATES, LAST, estimate
from scissorhands.row import Eviction
from scissorhands.step import ModelStep
from scissorhands.summary import BLOCK_SLOTS, pack_summary, read_summary, summary_bytes
from scissorhands.swap import sketch_of

Floats = npt.NDArray[np.float32]
# Logarithm of what each query gives a block, from the queries and the block's keys.
Score = Callable[[Floats, Floats], Floats]


def exact(queries: Floats, keys: Floats) -> Floats:
    """Score by the keys themselves."""
    found: Floats = np.logaddexp.reduce(queries @ keys.T, axis=1)
    return found


def bounds(queries: Floats, keys: Floats) -> Floats:
    """Score by the smallest and largest elements, as Quest does (arXiv 2406.10774)."""
    found: Floats = np.maximum(queries * keys.min(axis=0), queries * keys.max(axis=0)).sum(axis=1)
    return found


def mean(queries: Floats, keys: Floats) -> Floats:
    """Score by one centroid."""
    found: Floats = queries @ keys.mean(axis=0) + np.log(len(keys))
    return found


def ours(queries: Floats, keys: Floats) -> Floats:
    """Score by four centroids of four bits."""
    centroids, counts = centroids_of([torch.from_numpy(keys)])
    data = pack_summary([np.arange(len(keys))], centroids.numpy(), counts.numpy())
    (section,) = read_summary(data, [len(keys)], keys.shape[1])
    return estimate(queries, section.centroids, section.counts)[:, 0]


def half_bytes(vectors: int, head_dim: int) -> int:
    """Return the bytes of vectors in 16 bits."""
    return 2 * vectors * head_dim


SCORES: dict[str, tuple[Score, Callable[[int], int]]] = {
    "bounds": (bounds, lambda head_dim: half_bytes(2, head_dim)),
    "one centroid": (mean, lambda head_dim: half_bytes(1, head_dim)),
    "four centroids, 4 bits": (ours, lambda head_dim: summary_bytes([BLOCK_SLOTS], head_dim) - 4 * BLOCK_SLOTS),
    "the keys": (exact, lambda head_dim: half_bytes(BLOCK_SLOTS, head_dim)),
}


@torch.inference_mode()
def measure(setup: Setup, choice: Choice, prompt: list[int], answer: list[int], share: float) -> dict[str, float]:
    """Return the attention on evicted tokens, and how much of it each summary finds, in queries over all heads."""
    shape, model = setup.shape, setup.model
    full = interval_sums(model, torch.tensor([prompt + answer]), [0, len(prompt) - 1])
    cache, step = ResidentCache(shape, model.dtype, model.device), ModelStep(model)
    row = cache.add_row(setup.grant(choice, len(prompt) + len(answer)), limit=len(prompt) + len(answer))
    evictions: list[Eviction | None] = []
    while row.step < len(prompt) - LAST:
        size = row.next_chunk(len(prompt) - LAST - row.step)
        evictions.append(cache.prepare_prefill(row, size))
        step([row], [prompt[row.step : row.step + size]])
    evictions.append(cache.prepare_prefill(row, LAST))
    sketch = sketch_of(row, step.peek(row, prompt[-LAST:]), share)
    found = dict.fromkeys(["evicted", *SCORES], 0.0)
    for head, asked in enumerate(sketch):
        layer, own = (head, 0) if row.grant.by_head else divmod(head, shape.kv_heads)
        attention = full[head // shape.kv_heads][0, head % shape.kv_heads, 1].numpy()
        taken = [eviction.layers[layer] for eviction in evictions if eviction]
        blocks = [
            (
                slots.positions[own, start : start + BLOCK_SLOTS].numpy(),
                slots.keys[own, start : start + BLOCK_SLOTS].numpy(),
            )
            for slots in taken
            for start in range(0, slots.positions.shape[1], BLOCK_SLOTS)
        ]
        found["evicted"] += sum(float(attention[positions].sum()) for positions, _ in blocks)
        for name, (score, _) in SCORES.items():
            found[name] += _found(blocks, asked.queries.astype(np.float32), asked.allowance, attention, score)
    return found


def _found(
    blocks: list[tuple[npt.NDArray[np.int32], Floats]], queries: Floats, allowance: int, attention: Floats, score: Score
) -> float:
    """Return the attention on the best blocks, as many slots as a worker gets to choose from."""
    if not blocks or not allowance:
        return 0.0
    scores = np.stack([score(queries, keys) for _, keys in blocks], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    chosen = np.concatenate([blocks[block][0] for block in np.argsort(-shares, kind="stable")])[
        : allowance * CANDIDATES
    ]
    return float(attention[chosen].sum())


def main() -> None:
    """Measure, print a line for each summary, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".models/smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--policy", default="scissorhands")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/recall_summaries.json"))
    asked = parser.parse_args()
    choice, kind = Choice(asked.policy, "none", asked.budget), KINDS["passkey"]
    texts = tuple(read_text(path) for path in asked.text)
    setup = prepare(Request(asked.model, texts, (choice,), asked.prompts, asked.length, False, "auto", "auto", None))
    total = dict.fromkeys(["evicted", *SCORES], 0.0)
    fillers = cuts_of(list(texts), setup.tokenizer, asked.prompts, asked.length).tolist()
    for trial, filler in enumerate(fillers):
        prompt = hide(fact_of(kind, 0, trial), setup.tokenizer, filler, 0.5, asked.length - kind.new_tokens)
        eos = eos_ids(setup.model, setup.tokenizer)
        (answer,) = Decoder(setup.model, setup.full_grant(asked.length), [prompt], kind.new_tokens).answer(
            kind.new_tokens, eos
        )
        for name, attention in measure(setup, choice, prompt, answer, asked.share).items():
            total[name] += attention
    head_dim = setup.shape.head_dim
    ratios = {name: total[name] / total["evicted"] for name in SCORES}
    sizes = {name: size(head_dim) for name, (_, size) in SCORES.items()}
    for name, ratio in ratios.items():
        print(f"{name:24} {sizes[name]:6} bytes a block, {ratio:.1%} of the attention on evicted tokens")
    settings = {name: str(value) for name, value in vars(asked).items() if name not in ("json", "text")}
    document = {
        "ratios": ratios,
        "bytes_per_block": sizes,
        "settings": {**settings, "texts": [text.name for text in texts], "block_slots": BLOCK_SLOTS},
        "environment": {"torch": torch.__version__, "platform": platform.platform(), "cpus": os.cpu_count()},
    }
    asked.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
