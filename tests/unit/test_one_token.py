"""One new token a row takes a shorter way to the same answers, the same slots and the same evidence."""

import pytest
import torch
from support.tiny_models import tiny_model

from scissorhands import one_token
from scissorhands.attention import attend
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.new_tokens import NewTokens
from scissorhands.probe import model_shape
from scissorhands.span import Span

SLOTS, ROWS, GROUP = 48, 4, 3
# Scores are rounded before or after they are scaled.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2}}
EVEN, UNEVEN = (30, 30, 30, 30), (30, 47, 0, 31)


def filled(dtype, policy="h2o", codec="none"):
    """Return the pool of some rows with random slots."""
    shape = model_shape(tiny_model("llama_wide"))
    cache = ResidentCache(shape, dtype, torch.device("cpu"))
    granted = grant(BudgetRequest.tokens(SLOTS), PolicyRequest(policy), shape, 4 * SLOTS, codec=codec)
    rows = [cache.add_row(granted) for _ in range(ROWS)]
    generator = torch.Generator().manual_seed(7)
    for layer in rows[0].pool.layers:
        for tensor in layer.tensors():
            tensor.copy_(torch.randint(0, 99, tensor.shape, generator=generator) / 49 - 1)
    return rows


def new_tokens(layer, rows):
    heads = layer.keys.shape[1]
    generator = torch.Generator().manual_seed(8)
    query, keys, values = (
        torch.randn(rows, count, 1, layer.head_dim, generator=generator).to(layer.dtype)
        for count in (heads * GROUP, heads, heads)
    )
    return NewTokens(query, keys, values, scaling=0.3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("observe", [True, False])
@pytest.mark.parametrize("lengths", [EVEN, UNEVEN])
@pytest.mark.parametrize("some", [slice(0, ROWS), slice(1, 3)])
def test_it_does_what_attention_does_for_any_number_of_tokens(some, lengths, observe, dtype):
    general, short = filled(dtype), filled(dtype)
    for rows in (general, short):
        for row, length in zip(rows, lengths, strict=True):
            row.lengths = [length] * len(row.lengths)
            row.step = 3 * length
    steps = tuple(row.step for row in general[some])
    span = Span(some, lengths[some], steps, 1, torch.device("cpu"))
    lanes = one_token.lanes_of(short[some], torch.device("cpu"))
    for index, (expected, layer) in enumerate(zip(general[0].pool.layers, short[0].pool.layers, strict=True)):
        new = new_tokens(layer, len(steps))
        assert one_token.fits(layer, new)
        answer = attend(expected, span, new, observe=observe)
        found = one_token.attend_one(layer, lanes[index], new, observe=observe)
        torch.testing.assert_close(found, answer, **TOLERANCES[dtype])
        for own, other in zip(layer.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(own, other, **TOLERANCES[dtype])


def test_rows_whose_layers_differ_in_length_see_their_own_slots():
    rows = filled(torch.float32)
    for index, row in enumerate(rows):
        row.lengths = [20 + (layer + index) % 3 for layer in range(len(row.lengths))]
    for layer, lanes in enumerate(one_token.lanes_of(rows, torch.device("cpu"))):
        lengths = torch.tensor([row.lengths[layer] for row in rows]).repeat_interleave(rows[0].pool.kv_heads)
        assert torch.equal(lanes.newest, lengths)
        assert lanes.extent == lengths.max() + 1
        hidden = torch.zeros(len(lengths), 1, lanes.extent, dtype=torch.bool)
        if lanes.hidden is not None:
            hidden[..., -lanes.hidden.shape[-1] :] = lanes.hidden
        assert torch.equal(hidden.squeeze(1), torch.arange(lanes.extent) > lengths[:, None])


@pytest.mark.parametrize(("policy", "codec"), [("tova", "none"), ("h2o", "int4")])
def test_more_evidence_than_mass_and_packed_slots_go_the_general_way(policy, codec):
    layer = filled(torch.float32, policy, codec)[0].pool.layers[0]
    assert not one_token.fits(layer, new_tokens(layer, 1))


def test_several_tokens_go_the_general_way():
    layer = filled(torch.float32)[0].pool.layers[0]
    new = new_tokens(layer, 1)
    assert not one_token.fits(layer, new._replace(query=new.query.expand(-1, -1, 2, -1)))
