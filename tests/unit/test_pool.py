"""Pools: exact bytes whatever comes and goes, and slots that stay their token's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.budget import BudgetRequest, Grant, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.compaction import evict
from scissorhands.evidence import evidence_of
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerPool
from scissorhands.row import Row
from scissorhands.signals import signals_for
from scissorhands.span import Span

SHAPE = ModelShape(layers=2, kv_heads=3, head_dim=4, element_bytes=4)
CPU = torch.device("cpu")
GRANTS = [
    grant(BudgetRequest.tokens(tokens), PolicyRequest(*policy), SHAPE)
    for tokens, policy in [
        (32, ("scissorhands", "counts")),
        (48, ("scissorhands", "counts")),
        (30, ("scissorhands", "paper")),
        (32, ("h2o",)),
        (32, ("streaming",)),
        (32, ("tova",)),
        (32, ("snapkv",)),
        (32, ("r-kv",)),
        (32, ("fastgen",)),
        (32, ("expected-attention",)),
        (8, ("full",)),
    ]
]
GRANTS.append(
    Grant("h2o", "default", (20, 36), GRANTS[3].parameters, bytes=GRANTS[3].bytes * (20 + 36) // (2 * 32)),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.sampled_from(GRANTS), st.integers(0, 7)), max_size=24))
def test_any_order_of_coming_and_going_keeps_contents_and_exact_bytes(events):
    cache = ResidentCache(SHAPE, torch.float32, CPU)
    rows: list[tuple[Row, int]] = []
    for number, event in enumerate(events):
        if isinstance(event, Grant):
            row = cache.add_row(event)
            assert not any(tensor[row.index].any() for tensor in tensors_of(row)), "a new row is empty"
            rows.append((row, number % 100 + 1))
            for tensor in tensors_of(row):
                tensor[row.index] = rows[-1][1]
        elif rows:
            cache.remove_row(rows.pop(event % len(rows))[0])
        assert cache.allocated_bytes() == sum(row.grant.bytes for row, _ in rows)
        assert cache.allocated_bytes() == storage_bytes({row.pool for row, _ in rows})
        for row, mark in rows:
            assert all(bool((tensor[row.index] == tensor.new_tensor(mark)).all()) for tensor in tensors_of(row))
        places = {(id(row.pool), row.index) for row, _ in rows}
        assert len(places) == len(rows)
        assert all(row.index < row.pool.rows for row, _ in rows)


@pytest.mark.parametrize(
    ("policy", "evidence"),
    [
        # A position (4 bytes), the mass (4), and the policy's own.
        (PolicyRequest("h2o"), 8),
        (PolicyRequest("streaming"), 8),
        (PolicyRequest("tova"), 12),
        (PolicyRequest("snapkv"), 16),
        (PolicyRequest("snapkv", "", {"window": 64}), 16),
        (PolicyRequest("r-kv"), 16),
        (PolicyRequest("fastgen"), 9),
        # A mean and a sum of squares, 4 bytes each, for each of two query heads.
        (PolicyRequest("expected-attention"), 24),
        (PolicyRequest("protected", "fastgen"), 9),
        (PolicyRequest("full"), 8),
        (PolicyRequest("scissorhands"), 8),
        (PolicyRequest("scissorhands", "counts"), 10),
        (PolicyRequest("scissorhands", "paper"), 408),
        (PolicyRequest("scissorhands", "paper", {"window": 33}), 41),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_grant_tells_the_bytes(policy, evidence, dtype):
    shape = ModelShape(layers=5, kv_heads=3, head_dim=8, element_bytes=dtype.itemsize, group=2)
    granted = grant(BudgetRequest.tokens(40), policy, shape)
    cache = ResidentCache(shape, dtype, CPU)
    cache.add_row(granted)
    assert cache.allocated_bytes() == granted.bytes == 5 * 3 * 40 * (2 * 8 * dtype.itemsize + evidence)


def test_rows_of_equal_shape_share_a_pool_and_others_do_not():
    cache = ResidentCache(SHAPE, torch.float32, CPU)
    rows = [cache.add_row(granted) for granted in (*GRANTS, *GRANTS)]
    for first, second in zip(rows[: len(GRANTS)], rows[len(GRANTS) :], strict=True):
        assert first.pool is second.pool
    assert len({id(row.pool) for row in rows}) == len(GRANTS)


def test_a_span_tells_where_tokens_go_and_what_they_see():
    span = Span(slice(2, 4), lengths=(1, 3), steps=(5, 9), incoming=2, device=CPU)
    assert span.extent == 5
    assert not span.even
    assert span.row_index.tolist() == [[2], [3]]
    assert span.slot_index.tolist() == [[1, 2], [3, 4]]
    assert span.positions.tolist() == [[5, 6], [9, 10]]
    assert span.visible is not None
    assert span.visible[:, 0].int().tolist() == [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]
    single = Span(slice(0, 2), lengths=(3, 3), steps=(5, 9), incoming=1, device=CPU)
    assert single.even
    assert single.visible is None


@pytest.mark.parametrize("incoming", [1, 3])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 0, 2)])
def test_rows_appended_together_are_as_if_appended_alone(lengths, incoming):
    together, alone = layer_pool(rows=3), layer_pool(rows=3)
    for tensor, twin in zip(together.tensors(), alone.tensors(), strict=True):
        tensor.fill_(7)  # Left over from tokens that are gone.
        twin.fill_(7)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 3, incoming, 4, generator=generator)
    together.append(Span(slice(0, 3), lengths, (9, 8, 7), incoming, CPU), keys, values)
    for row, (length, step) in enumerate(zip(lengths, (9, 8, 7), strict=True)):
        one = slice(row, row + 1)
        alone.append(Span(one, (length,), (step,), incoming, CPU), keys[one], values[one])
    for tensor, twin in zip(together.tensors(), alone.tensors(), strict=True):
        assert torch.equal(tensor, twin)
    new = slice(lengths[2], lengths[2] + incoming)
    assert torch.equal(together.keys[2, :, new], keys[2])
    assert torch.equal(together.values[2, :, new], values[2])
    assert together.positions[2, :, new].tolist() == [list(range(7, 7 + incoming))] * 3
    assert all(bool((state == 7).all()) for state in together.states)


@pytest.mark.parametrize("lengths", [(2, 2), (2, 1)])
def test_appending_again_leaves_the_evidence_that_counts_already(lengths):
    pool = layer_pool(rows=2)
    for state in pool.states:
        state.fill_(3)
    keys = torch.ones(2, 3, 1, 4)
    pool.append(Span(slice(0, 2), lengths, (5, 5), 1, CPU), keys, keys, fresh=False)
    assert all(bool((state == 3).all()) for state in pool.states)
    assert pool.keys.sum() == keys.sum()


def test_compacting_moves_each_heads_own_slots_to_the_front():
    pool = layer_pool(rows=2)
    for tensor in pool.tensors():
        slots = torch.arange(8).view(1, 1, 8, *[1] * (tensor.dim() - 3))
        tensor.copy_((slots + 10 * torch.arange(3).view(1, 3, 1, *[1] * (tensor.dim() - 3))).to(tensor.dtype))
    before = [tensor[0].clone() for tensor in pool.tensors()]
    for state in pool.states:
        state[1, :, 7:] = 0  # The eighth slot is free.
    keep = np.array([[1, 0, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]], dtype=bool)
    (taken,) = evict([pool], 1, [7], [keep])
    # The slots from the sixth on came after the snapshot, and stay.
    expected = [[0, 2, 5, 6], [11, 12, 15, 16], [23, 24, 25, 26]]
    gone = [[1, 3, 4], [10, 13, 14], [20, 21, 22]]
    assert pool.positions[1, :, :4].tolist() == expected
    assert pool.keys[1, :, :4, 0].tolist() == expected
    assert pool.values[1, :, :4, 3].tolist() == expected
    assert pool.states[0][1, :, :4].tolist() == expected
    assert pool.states[1][1, :, :4, 1].tolist() == expected
    assert taken.positions.tolist() == taken.keys[..., 0].tolist() == taken.values[..., 3].tolist() == gone
    assert taken.mass.tolist() == gone
    assert not any(state[1, :, 4:].any() for state in pool.states), "free slots have no evidence"
    for tensor, row in zip(pool.tensors(), before, strict=True):
        assert torch.equal(tensor[0], row), "the other row stays"


def test_what_was_taken_and_evidence_are_copies():
    pool = layer_pool(rows=1)
    (evidence,) = evidence_of([pool], 0, [4], 4)
    (taken,) = evict([pool], 0, [4], [np.array([[0, 0, 1, 1]] * 3, dtype=bool)])
    for tensor in pool.tensors():
        tensor.fill_(1)
    assert not taken.keys.any()
    assert not taken.mass.any()
    assert not evidence.positions.any()
    assert not any(signal.any() for signal in evidence.signals.values())
    assert evidence.positions.shape == evidence.signals["low_count"].shape == (3, 4)
    assert np.issubdtype(evidence.signals["low_count"].dtype, np.integer)


@pytest.mark.parametrize("policy", ["h2o", "fastgen", "snapkv"])
def test_evidence_of_several_layers_is_that_of_each(policy):
    """Evidence that is its signals' state is copied in one call, and other evidence layer by layer."""
    signals = signals_for(grant(BudgetRequest.tokens(32), PolicyRequest(policy), SHAPE), 1)
    layers = [LayerPool(2, 3, slots, 4, signals, torch.float32, CPU) for slots in (8, 12, 9)]
    generator = torch.Generator().manual_seed(1)
    for layer in layers:
        for tensor in layer.tensors():
            tensor.copy_(torch.randint(1, 100, tensor.shape, generator=generator))
    lengths = [8, 5, 0]
    found = evidence_of(layers, 1, lengths, step=200)
    for layer, length, own in zip(layers, lengths, found, strict=True):
        expected = layer.evidence(1, length, step=200)
        assert own.length == length
        assert np.array_equal(own.positions, expected.positions)
        assert own.signals.keys() == expected.signals.keys()
        for name, value in expected.signals.items():
            assert np.array_equal(own.signals[name], value), name


def layer_pool(rows: int) -> LayerPool:
    """Return a layer with three heads of eight slots of four elements, and the default policy's signals."""
    return LayerPool(rows, 3, 8, 4, signals_for(GRANTS[0], 1), torch.float32, CPU)


def tensors_of(row: Row) -> list[torch.Tensor]:
    return [tensor for layer in row.pool.layers for tensor in layer.tensors()]


def storage_bytes(pools) -> int:
    """Return the bytes of all storages, each counted once, with nothing in them that is not a row's."""
    tensors = [tensor for pool in pools for layer in pool.layers for tensor in layer.tensors()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) == sum(tensor.nbytes for tensor in tensors)
    return sum(storages.values())
