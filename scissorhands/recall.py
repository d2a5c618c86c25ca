"""Recall: which evicted slots recent queries ask for. Plain numpy: the manager decides by it without the model.

The worker sends a **sketch**: of every KV head some queries, and what it holds already. Each query is put to the
summaries of all evicted sections (:mod:`scissorhands.summary`). A block's share of the attention that the query would
give to evicted tokens is estimated, shares are averaged over the queries, and the blocks with the largest are the
**candidates**, several times as many slots as may be recalled. Their keys come to the worker, which chooses among them
slot by slot (:mod:`scissorhands.swap`): where a query looks, neighbors are often of no use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scissorhands.summary import BLOCK_SLOTS, Floats, SectionSummary, blocks_of

# Tokens of a prompt that are read after its recall, so that they can make use of it: a question is to be among them.
# Their queries ask for it, so they are looked at beforehand.
LAST = 32
# Recalls at the end of a prompt, one after another: what has come back lets deeper layers ask for more.
ROUNDS = 3

# Slots that are read for each that may be recalled.
CANDIDATES = 4

Chosen = npt.NDArray[np.intp]


@dataclass(frozen=True)
class HeadSketch:
    """What one KV head asks for.

    Args:
        queries: ``[queries, head_dim]`` float16, of all query heads of its group, after position embedding and times
            the factor on the scores.
        resident: ``[n]`` positions that it holds, ascending.
        allowance: Most slots to recall.
    """

    queries: npt.NDArray[np.float16]
    resident: npt.NDArray[np.integer]
    allowance: int


@dataclass(frozen=True)
class Found:
    """Slots of one section that are candidates.

    Args:
        epoch: Epoch of the segment.
        head: Place of the section in the segment's table: by layer, then by KV head.
        slots: Which of the section's slots, ascending.
    """

    epoch: int
    head: int
    slots: Chosen


def last_tokens(layers: int, global_layers: int) -> int:
    """Return how many tokens of a prompt are read after its recall; over sliding layers one can be peeked at only."""
    return LAST if layers == global_layers else 1


def allowance(share: float, slots: int, used: int, exempt: int) -> int:
    """Return how many slots of a head may be recalled.

    Args:
        share: Share of the budget.
        slots: B of the head.
        used: n, its slots in use.
        exempt: The most of them that no policy gives up.
    """
    return max(0, min(int(share * slots), used - exempt))


def estimate(queries: npt.NDArray[np.floating], centroids: Floats, counts: npt.NDArray[np.integer]) -> Floats:
    """Estimate the logarithm of what each query gives each block before the softmax is normalized.

    Args:
        queries: ``[queries, head_dim]``, scaled.
        centroids: ``[blocks, 4, head_dim]``.
        counts: ``[blocks, 4]``.

    Returns:
        ``[queries, blocks]``.
    """
    blocks, each, head_dim = centroids.shape
    # A centroid that stands for no key counts for nothing, and a model that computes nonsense recalls anything.
    with np.errstate(divide="ignore", invalid="ignore"):
        products = queries.astype(np.float32) @ centroids.reshape(-1, head_dim).T
        weighted = products.reshape(-1, blocks, each) + np.log(counts.astype(np.float32))
        found: Floats = np.logaddexp.reduce(weighted, axis=2)
    return found


def choose(sketch: Sequence[HeadSketch], archive: Mapping[int, Sequence[SectionSummary]]) -> list[Found]:
    """Choose the candidates of all heads.

    Args:
        sketch: Of each KV head, by layer, then by head.
        archive: By epoch, the summaries of a segment's sections in the same order.

    Returns:
        By epoch, then by head; no token of a head twice, and none that it holds.
    """
    found = [
        Found(epoch, head, slots)
        for head, asked in enumerate(sketch)
        for epoch, slots in _of_head(asked, {epoch: sections[head] for epoch, sections in archive.items()}).items()
    ]
    return sorted(found, key=lambda part: (part.epoch, part.head))


def _of_head(asked: HeadSketch, sections: Mapping[int, SectionSummary]) -> dict[int, Chosen]:
    """Choose the candidates of one head, by epoch."""
    held = {epoch: section for epoch, section in sections.items() if len(section.positions)}
    if not held or not asked.allowance or not len(asked.queries):
        return {}
    places = [(epoch, block) for epoch, section in held.items() for block in range(blocks_of(len(section.positions)))]
    scores = estimate(
        asked.queries,
        np.concatenate([section.centroids for section in held.values()]),
        np.concatenate([section.counts for section in held.values()]),
    )
    scores -= scores.max(axis=1, keepdims=True)
    weights = np.exp(scores)
    shares = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    # Numbers that are not finite stand last, and the older of equal blocks first.
    order = np.argsort(-np.nan_to_num(shares, nan=-1.0), kind="stable")
    taken = set(asked.resident.tolist())
    chosen: dict[int, list[int]] = {}
    left = asked.allowance * CANDIDATES
    for place in order.tolist():
        epoch, block = places[place]
        first = block * BLOCK_SLOTS
        positions = held[epoch].positions[first : first + BLOCK_SLOTS].tolist()
        # Of a block that does not fit as a whole the newest tokens.
        fresh = [first + at for at, position in enumerate(positions) if position not in taken][-left:]
        if fresh:
            taken.update(positions)
            chosen.setdefault(epoch, []).extend(fresh)
            left -= len(fresh)
        if not left:
            break
    return {epoch: np.array(sorted(slots), dtype=np.intp) for epoch, slots in chosen.items()}
