import math

import pytest
import torch

from scissorhands.divergence import divergence


def test_a_distribution_does_not_diverge_from_itself():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    nats, same = divergence(logits, logits + 3)  # Adding a constant changes no probability.
    assert nats.tolist() == pytest.approx([0] * 5, abs=1e-12)
    assert same.all()


def test_it_is_the_divergence_from_the_reference_and_not_the_other_way_round():
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    found = torch.tensor([[0.75, 0.25], [0.1, 0.9]]).log()
    nats, same = divergence(found, reference)
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert nats.tolist() == pytest.approx([first, 0.8 * math.log(9)], rel=1e-6)
    assert same.tolist() == [True, False]


def test_tokens_that_are_impossible_count_only_if_the_reference_finds_them_possible():
    never = -math.inf
    nats, _ = divergence(torch.tensor([[0.0, never], [0.0, never]]), torch.tensor([[0.0, never], [0.0, 0.0]]))
    assert nats.tolist() == [0, math.inf]
