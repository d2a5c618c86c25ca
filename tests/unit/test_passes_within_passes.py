"""Between two layers of a forward pass others may have one of their own, come and go: no number changes by that."""

import pytest
import torch
from support.speaker import Speaker
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import BudgetRequest

IDS = random_tokens(60, seed=3).tolist()
NEXT = random_tokens(12, seed=4).tolist()
OTHERS = random_tokens(80, seed=5).tolist()


def tensors(row):
    """Return copies of all numbers of a row."""
    return [tensor[row.index].clone() for layer in row.pool.layers for tensor in layer.tensors()]


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "snapkv"])
@pytest.mark.parametrize("model", ["llama_grouped", "qwen2", "gpt_neox"])
@torch.inference_mode()
def test_a_pass_that_stops_between_layers_is_the_one_that_does_not(model, policy):
    alone, beside = (Speaker(tiny_model(model), policy, BudgetRequest.tokens(100)) for _ in range(2))
    row = alone.cache.add_row(alone.grant)
    alone.turn(row, list(IDS), 1)
    expected = alone.step([row], [NEXT])

    gone, decoding, reading = (beside.cache.add_row(beside.grant) for _ in range(3))
    beside.turn(gone, list(OTHERS), 1)
    beside.turn(decoding, list(OTHERS), 1)
    beside.turn(reading, list(IDS), 1)
    heard, place = [], gone.index

    def meanwhile(layer):
        beside.cache.prepare_decode(decoding)
        heard.append(beside.step([decoding], [[layer]]))
        if layer == 1:
            beside.cache.remove_row(gone)
            beside.cache.add_row(beside.grant)

    assert torch.equal(beside.step([reading], [NEXT], meanwhile), expected)
    assert len(heard) > 1
    assert reading.index == place
    assert all(torch.equal(one, other) for one, other in zip(tensors(row), tensors(reading), strict=True))
    assert (reading.lengths, reading.step) == (row.lengths, row.step)
