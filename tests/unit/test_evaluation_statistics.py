"""Statistics of losses, against what can be computed by hand."""

import numpy as np
import pytest

from scissorhands.evaluation.statistics import increase_percent, interval_percent, perplexity


def losses(sequences=6, positions=50, seed=0):
    return np.random.default_rng(seed).uniform(1, 4, (sequences, positions)).astype(np.float32)


def test_perplexity_by_hand():
    assert perplexity(np.log(np.array([[2.0, 8.0], [4.0, 4.0]]))) == pytest.approx(4.0)


def test_an_even_increase_has_no_spread():
    reference = losses()
    raised = reference + np.float32(np.log(1.1))
    assert increase_percent(raised, reference) == pytest.approx(10.0, abs=1e-4)
    assert interval_percent(raised, reference) == pytest.approx((10.0, 10.0), abs=1e-4)
    assert increase_percent(raised, reference) == pytest.approx(100 * (perplexity(raised) / perplexity(reference) - 1))


def test_the_interval_is_of_pairs_and_over_sequences():
    # The sequences differ greatly from each other, and their increases little: only pairs give a narrow interval.
    reference = losses() + np.arange(6, dtype=np.float32)[:, None]
    by_sequence = np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06], dtype=np.float32)
    low, high = interval_percent(reference + by_sequence[:, None], reference)
    assert 1.0 < low < 100 * np.expm1(0.035) < high < 6.2
    # The bootstrap's standard error is the spread over sequences, by the root of their number.
    half = 1.96 * by_sequence.std() / np.sqrt(6) * 100
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)


def test_equal_seeds_give_equal_intervals():
    first, second = (interval_percent(losses(seed=1), losses(), seed=3) for _ in range(2))
    assert first == second
    assert interval_percent(losses(seed=1), losses(), seed=4) != first


def test_one_sequence_has_no_interval():
    assert interval_percent(losses(1), losses(1)) is None
