"""The paper's preset step by step, on an example small enough to follow by hand.

One layer, one head, B = 4, m = 2, r = 1, w = 3. The query of token t gives the slots in use the attention of the table.
The average is 1/(t + 1), over all t + 1 tokens of the sequence, evicted ones included; a slot that gets less is low.
Low counts are taken over the last three queries.
"""

from dataclasses import dataclass

import pytest
import torch

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.span import Span

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=2, element_bytes=4)
NUMBERS = {"recent": 1, "drop": 2, "chunk": 1, "window": 3}


@dataclass(frozen=True)
class Step:
    """One decoded token.

    Args:
        dropped: Positions evicted to make room for it.
        attention: What its query gives each slot, by the slot's position.
        low: Low count of each slot afterwards, by position.
    """

    dropped: list[int]
    attention: dict[int, float]
    low: dict[int, int]


STEPS = [
    # Average 1: the only token gets it all, which is not below it.
    Step([], {0: 1.0}, {0: 0}),
    # Average 1/2.
    Step([], {0: 0.3, 1: 0.7}, {0: 1, 1: 0}),
    # Average 1/3. Exactly average is not low, but 1/3 is no sum of powers of two: 0.34 stands a little above.
    Step([], {0: 0.5, 1: 0.16, 2: 0.34}, {0: 1, 1: 1, 2: 0}),
    # Average 1/4; 0.25 is exactly average and not low. Query 0 leaves the window, and counted for nobody.
    Step([], {0: 0.2, 1: 0.25, 2: 0.45, 3: 0.1}, {0: 2, 1: 1, 2: 0, 3: 1}),
    # Full. Token 3 is exempt as the newest; 0 (count 2) and 1 (count 1) go. Average 1/5, over five tokens though only
    # three are in use: over those it would be 1/3, and token 2 would be low. Query 1 leaves.
    Step([0, 1], {2: 0.25, 3: 0.05, 4: 0.7}, {2: 0, 3: 2, 4: 0}),
    # Average 1/6. Query 2 leaves, and token 3 came after it.
    Step([], {2: 0.1, 3: 0.2, 4: 0.1, 5: 0.6}, {2: 1, 3: 2, 4: 1, 5: 0}),
    # Full. 3 (count 2) goes, and of 2 and 4 (count 1 each) the older. Average 1/7. Query 3 leaves; of the slots in use
    # it had been low on token 3 alone.
    Step([2, 3], {4: 0.2, 5: 0.1, 6: 0.7}, {4: 1, 5: 1, 6: 0}),
    # Average 1/8 = 0.125, exactly what token 6 gets. Query 4 leaves.
    Step([], {4: 0.5, 5: 0.075, 6: 0.125, 7: 0.3}, {4: 1, 5: 2, 6: 0, 7: 0}),
    # Full. 5 (2) and 4 (1) go. Average 1/9. Query 5 leaves.
    Step([4, 5], {6: 0.05, 7: 0.05, 8: 0.9}, {6: 1, 7: 1, 8: 0}),
]


def test_the_consistent_reading_of_algorithm_2():
    granted = grant(BudgetRequest.tokens(4), PolicyRequest("scissorhands", "paper", NUMBERS), SHAPE)
    cache = ResidentCache(SHAPE, torch.float32, torch.device("cpu"))
    row = cache.add_row(granted)
    pool = row.pool.layers[0]
    resident: list[int] = []
    for token, step in enumerate(STEPS):
        eviction = cache.prepare_decode(row)
        assert (eviction.layers[0].positions.tolist() if eviction else [[]]) == [step.dropped], f"token {token}"
        resident = [position for position in resident if position not in step.dropped] + [token]
        assert list(step.attention) == resident, "the table names the slots in use"
        assert sum(step.attention.values()) == pytest.approx(1)

        span = Span(slice(0, 1), (row.lengths[0],), (token,), 1, cache.device)
        pool.append(span, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        attention = torch.tensor([[[[list(step.attention.values())]]]])
        pool.observe(span, attention, attention.log())
        row.advance(1)

        evidence = pool.evidence(0, row.lengths[0], token + 1)
        assert evidence.positions.tolist() == [resident]
        counts = evidence.signals["low_count_ring"][0].tolist()
        assert dict(zip(resident, counts, strict=True)) == step.low, f"token {token}"


def test_the_numbers_are_the_papers():
    numbers = grant(BudgetRequest.tokens(100), PolicyRequest("scissorhands", "paper"), SHAPE).parameters
    assert (numbers.window, numbers.recent, numbers.drop) == (400, 10, 50)
    assert (numbers.sinks, numbers.lookahead) == (0, 0)
