"""The processor's kernel does what attention does for any number of tokens: the same slots, evidence and answers."""

import math

import numba
import pytest
import torch
from numba import njit
from support.codec_data import HEADS, codec_of
from support.tiny_models import tiny_model

from scissorhands import view
from scissorhands.attention import attend
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.errors import EngineError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.kernels import cpu_launch, cpu_vectors
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.probe import model_shape
from scissorhands.signals import LastAttention, Mass
from scissorhands.span import Span

CPU = torch.device("cpu")
SLOTS, ROWS, GROUP = 48, 4, 3
EVEN, UNEVEN = (30, 30, 30, 30), (30, 47, 0, 31)
# All that have a layout: steps and minima by group, even levels and bent ones of one scale, of all widths.
PACKED = ("int8", "int4", "int4-hadamard", "turboquant")
# What is packed is multiplied in another basis.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def layers(codec="none", dtype=torch.float32, signals=(), capacities=(SLOTS,), heads=HEADS, head_dim=64):
    """Return layers with random slots, which are the same every time."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for capacity in capacities:
        own = None if codec == "none" else codec_of(codec, head_dim)
        packed = None if own is None else LayerCodec(own.keys, own.values)
        layer = LayerPool(ROWS, heads, capacity, head_dim, (Mass(), *signals), dtype, CPU, packed)
        for name in ("keys", "values"):
            vectors = torch.randn(ROWS, heads, capacity, head_dim, generator=generator).to(dtype)
            getattr(layer, name).copy_(vectors if packed is None else getattr(packed, name).encode_rows(vectors))
        for tensor in (layer.positions, *layer.states):
            tensor.copy_(torch.randint(0, 99, tensor.shape, generator=generator))
        found.append(layer)
    return found


def new_tokens(rows, heads, head_dim=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(8)
    query, keys, values = (
        torch.randn(rows, 1, count, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for count in (heads * GROUP, heads, heads)
    )
    return NewTokens(query, keys, values, scaling=0.3)


def places(lengths, rows, count=1):
    class Row:
        def __init__(self, index, length):
            self.index, self.lengths, self.step, self.slack = index, [length] * count, 3 * length, 1

    return view.places_of([Row(index, lengths[index]) for index in range(rows.start, rows.stop)])


@pytest.mark.parametrize("codec", ["none", *PACKED])
@pytest.mark.parametrize("observe", [True, False])
@pytest.mark.parametrize("lengths", [EVEN, UNEVEN])
@pytest.mark.parametrize("rows", [slice(0, ROWS), slice(1, 3)])
def test_it_does_what_attention_does(rows, lengths, observe, codec):
    (expected,), (layer,) = layers(codec), layers(codec)
    own = lengths[rows]
    new = new_tokens(len(own), HEADS)
    answer = attend(expected, Span(rows, own, tuple(3 * length for length in own), 1, CPU), new, observe=observe)
    (call,) = cpu_launch.calls_of([layer], range(1))
    found = cpu_launch.attend(call, places(lengths, rows), new, observe=observe)
    torch.testing.assert_close(found, answer, **TOLERANCE)
    for mine, other in zip(layer.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


def test_heads_that_are_held_one_by_one_take_one_call_whatever_their_budgets():
    capacities = (SLOTS, SLOTS - 9, SLOTS + 5)
    own, expected = (layers(capacities=capacities, heads=1) for _ in range(2))
    (call,) = cpu_launch.calls_of(own, range(3))
    new = new_tokens(ROWS, 3)
    lengths = (30, 31, 0, 38)
    found = cpu_launch.attend(call, places(lengths, slice(0, ROWS), 3), new, observe=True)
    span = Span(slice(0, ROWS), lengths, tuple(3 * length for length in lengths), 1, CPU)
    alone = [attend(layer, span, part, observe=True) for layer, part in zip(expected, new.parts(3), strict=True)]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), **TOLERANCE)
    for layer, other in zip(own, expected, strict=True):
        torch.testing.assert_close(layer.states[0], other.states[0], **TOLERANCE)


def test_heads_that_are_packed_take_a_call_each():
    assert [call.layers for call in cpu_launch.calls_of(layers("int4", capacities=(9, 8), heads=1), range(2))] == [
        range(1),
        range(1, 2),
    ]


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_row_gets_the_same_numbers_in_any_batch_and_on_any_number_of_threads(codec, monkeypatch):
    (together,), (alone,), (threaded,) = (layers(codec) for _ in range(3))
    new = new_tokens(ROWS, HEADS)
    (call,) = cpu_launch.calls_of([together], range(1))
    batch = cpu_launch.attend(call, places(UNEVEN, slice(0, ROWS)), new, observe=True)
    (call,) = cpu_launch.calls_of([alone], range(1))
    for row in range(ROWS):
        own = cpu_launch.attend(call, places(UNEVEN, slice(row, row + 1)), new.at(slice(row, row + 1)), observe=True)
        assert torch.equal(own, batch[row : row + 1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (call,) = cpu_launch.calls_of([threaded], range(1))
    try:
        several = cpu_launch.attend(call, places(UNEVEN, slice(0, ROWS)), new, observe=True)
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    torch.testing.assert_close(several, batch, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(threaded.states[0], together.states[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("other", [{"dtype": torch.bfloat16}, {"signals": (LastAttention(),)}, {"codec": "klt:k4.5v4"}])
def test_other_number_types_more_evidence_and_mixed_widths_go_the_general_way(other):
    assert not cpu_launch.calls_of(layers(**other), range(1))


@pytest.mark.parametrize(("tokens", "dtype"), [(2, torch.float32), (1, torch.bfloat16)])
def test_so_do_several_tokens_and_those_of_other_types(tokens, dtype):
    new = new_tokens(1, HEADS, dtype=dtype)
    assert not cpu_launch.fits(new._replace(query=new.query.expand(-1, -1, tokens, -1)))


def test_calls_point_at_the_memory_of_the_rows_there_are():
    shape = model_shape(tiny_model("llama_wide"))
    cache = ResidentCache(shape, torch.float32, CPU)
    granted = grant(BudgetRequest.tokens(SLOTS), PolicyRequest("h2o"), shape, 4 * SLOTS)
    first = cache.add_row(granted)
    pool = first.pool
    for change in (lambda: cache.add_row(granted), lambda: cache.remove_row(first)):
        before = pool.cpu_calls(1)
        assert pool.cpu_calls(1) is before
        change()
        (call,) = pool.cpu_calls(1)
        assert call.keys[0].ctypes.data == pool.layers[1].keys.data_ptr()
        assert len(call.keys[0]) == pool.rows


def test_a_key_that_is_no_number_is_not_passed_over():
    (layer,) = layers()
    layer.keys[0, 1, 7, 3] = float("nan")
    (call,) = cpu_launch.calls_of([layer], range(1))
    found = cpu_launch.attend(call, places(EVEN, slice(0, ROWS)), new_tokens(ROWS, HEADS), observe=True)
    assert found[0, GROUP : 2 * GROUP].isnan().all()
    assert not found[0, :GROUP].isnan().any()
    assert not found[1:].isnan().any()


def test_a_row_without_room_is_not_written_beyond():
    shape = model_shape(tiny_model("llama_wide"))
    cache = ResidentCache(shape, torch.float32, CPU)
    row = cache.add_row(grant(BudgetRequest.tokens(SLOTS), PolicyRequest("h2o"), shape, 4 * SLOTS))
    row.lengths = list(row.grant.layer_slots)
    with pytest.raises(EngineError, match="no room"):
        view.places_of([row])


def test_its_exponentials_are_right_to_two_units_in_the_last_place():
    @njit
    def found(x):
        return cpu_vectors.exp(x)

    for power in torch.linspace(-86, 0, 4001).tolist():
        assert math.isclose(found(numba.float32(power)), math.exp(torch.tensor(power).item()), rel_tol=2.5e-7)
