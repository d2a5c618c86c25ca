"""Persistence and the change of attention, by hand and against transformers' own attention."""

import numpy as np
import pytest
import torch
from support.engine_path import EnginePath, kept_positions
from support.tiny_models import eager_attention, random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.evaluation.change import EDGES, measure_change
from scissorhands.evaluation.perplexity import feed
from scissorhands.evaluation.persistence import SHARES, measure_persistence, persistence_ratio
from scissorhands.evaluation.recorder import IntervalSums, above_average
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerPool
from scissorhands.signals.mass import Mass
from scissorhands.span import Span

LENGTH = 80


@pytest.fixture(scope="module")
def engine():
    return EnginePath(tiny_model("llama_grouped"))


@pytest.fixture(scope="module")
def tokens():
    return torch.stack([random_tokens(LENGTH, seed) for seed in range(2)])


@pytest.fixture(scope="module")
def attention(tokens):
    return eager_attention(tokens)


def test_a_ratio_by_hand():
    earlier = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=np.bool_)
    later = np.array([[1, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=np.bool_)
    found = persistence_ratio(earlier, later)
    # The last needs no token later, so it has no ratio.
    np.testing.assert_array_equal(found.ratio, [1 / 4, 1, 0, np.nan])
    assert found.pivotal.tolist() == [2 / 5, 1, 0, 1 / 5]
    # One of four where chance gives two of five; certain where every token is pivotal.
    np.testing.assert_allclose(found.beyond_chance, [(0.25 - 0.4) / 0.6, 0, 0, np.nan])


def observed(matrix):
    """Count, in the halves of a hand-made attention matrix [query, token], the queries above the average."""
    length = len(matrix)
    counts = torch.zeros(1, 1, 2, length)
    pool = LayerPool(1, 1, length, 1, (Mass(),), torch.float32, torch.device("cpu"))
    counter = IntervalSums((0, length // 2), above_average, counts)
    pool.signals = (*pool.signals, counter)
    pool.states.append(counter.allocate(1, 1, length, torch.device("cpu")))
    for first, end in ((0, 3), (3, 7), (7, length)):
        span = Span(slice(0, 1), (first,), (first,), end - first, torch.device("cpu"))
        block = torch.tensor(matrix[first:end, :end], dtype=torch.float32)[None, None, None]
        pool.observe(span, block, block.log())
    return counts[0, 0].numpy()


def test_a_matrix_with_known_persistence():
    rows = [
        [1.0],  # No more than the average of one.
        [0.9, 0.1],  # Above one half: token 0.
        [0.5, 0.1, 0.4],  # Above one third: 0 and 2.
        [0.1, 0.2, 0.6, 0.1],  # 2.
        [0, 0.6, 0, 0, 0.4],  # 1, and 4, which is of the later half.
        [0.5, 0.4, 0, 0, 0, 0.1],  # 0 and 1.
        [0.9, 0.1],  # 0.
        [0, 0, 0, 0.1, 0.1, 0.8],  # 5.
    ]
    counts = observed(np.array([row + [0] * (8 - len(row)) for row in rows]))
    assert counts[:, :4].tolist() == [[2, 0, 2, 0], [2, 2, 0, 0]]
    found = persistence_ratio(counts[0, :4] > 0, counts[1, :4] > 0)
    assert (found.ratio, found.pivotal) == (1 / 2, 2 / 4)


def test_persistence_is_that_of_transformers_attention(engine, tokens, attention):
    measured = measure_persistence(engine.model, tokens)
    assert tuple(measured) == SHARES
    half = LENGTH // 2
    for share, found in measured.items():
        assert found.ratio.shape == (2, 2, 2)
        for sequence, layer, head in np.ndindex(2, 2, 2):
            matrix = attention[layer][sequence, head].numpy()
            above = matrix > 1 / np.arange(1, LENGTH + 1)[:, None]
            earlier = np.array([above[token:half, token].mean() > share for token in range(half)])
            later = np.array([above[half:, token].mean() > share for token in range(half)])
            assert found.pivotal[sequence, layer, head] == pytest.approx(earlier.mean())
            again = (earlier & later).sum() / later.sum() if later.any() else np.nan
            assert found.ratio[sequence, layer, head] == pytest.approx(again, nan_ok=True)
    assert measured[0.0].pivotal.mean() > measured[0.5].pivotal.mean()


def test_nothing_changes_without_eviction(engine, tokens):
    whole = grant(BudgetRequest.fraction(1.0), PolicyRequest("h2o"), engine.shape, LENGTH)
    assert measure_change(engine.model, whole, tokens).pairs.sum() == 0


def test_change_counts_what_is_evicted_and_what_is_left(engine, tokens, attention):
    # One eviction, so the only change of the first layer is that what is evicted is missing.
    numbers = {"drop": 20, "lookahead": 0, "recent": 8, "chunk": 8}
    given = grant(BudgetRequest.tokens(60), PolicyRequest("h2o", parameters=numbers), engine.shape, LENGTH)
    found = measure_change(engine.model, given, tokens)
    cache = ResidentCache(engine.shape, engine.model.dtype, engine.model.device)
    rows = [cache.add_row(given, limit=LENGTH) for _ in tokens]
    for _ in feed(engine.model, cache, rows, tokens):
        pass
    pairs, dropped = np.zeros(2), np.zeros(2)
    for sequence, row in enumerate(rows):
        assert row.epoch == 1
        for head, kept in enumerate(kept_positions(row)[0]):
            for query in range(60, LENGTH):
                given_to = attention[0][sequence, head, query, : query + 1].numpy()
                above = given_to > 1 / (query + 1)
                held = np.isin(np.arange(query + 1), kept)
                pairs[head] += above.sum()
                dropped[head] += (above & ~held).sum()
    np.testing.assert_array_equal(found.pairs[0], pairs)
    np.testing.assert_array_equal(found.dropped[0], dropped)
    assert np.all(found.dropped > 0)
    # What is left shares what the evicted had, so all of it grows in the first layer.
    assert np.all(found.absolute[0] > 0)
    assert found.histogram.sum(axis=1) == pytest.approx(found.pairs.sum(axis=1))
    assert found.histogram[0, 0] == found.dropped[0].sum()
    assert found.histogram[1, 0] >= found.dropped[1].sum()
    assert found.histogram[0, 1 : np.searchsorted(EDGES, -0.05)].sum() == 0
