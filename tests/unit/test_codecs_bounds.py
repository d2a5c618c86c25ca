"""Round trips of codecs stay within the bounds that they state."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_data import DTYPES, HEADS, KINDS, ROTATED, SIZES, basis_of, codec_of, vectors

from scissorhands.codec.block_gtq import allocate
from scissorhands.codec.grouped import Grouped
from scissorhands.codec.kivi import ByChannel
from scissorhands.codec.packing import Group, Packing
from scissorhands.formats import BLOCK

# Half the distance between neighbors of a type, relatively.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_HALF = 2.0**-25

kinds = st.sampled_from(KINDS)
exponents = st.integers(-8, 4)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 99)


def bound_of_ranges(original: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    """Return what elements of ``[..., n]`` may be off by, in groups of ``size`` along the last dimension."""
    low, high = (
        torch.stack([reduce(part, dim=-1) for part in original.double().split(size, dim=-1)], dim=-1)
        for reduce in (torch.amin, torch.amax)
    )
    top = 2**bits - 1
    step = (high - low) / top
    of_low = (low.abs() * 2.0**-11).clamp_min(SMALLEST_HALF)
    of_step = (step * 2.0**-11).clamp_min(SMALLEST_HALF)
    found = (step / 2 + of_low + top * of_step) * (1 + 1e-6)
    return found.repeat_interleave(size, dim=-1)[..., : original.shape[-1]]


def assert_within(side: Grouped | ByChannel, original: torch.Tensor, largest: torch.Tensor) -> None:
    count, head_dim = original.shape[-2:]
    data = side.encode(original)
    exact = side.decode(data, count, head_dim, torch.float32).double()
    assert bool(((exact - original.double()).abs() <= largest).all())
    decoded = side.decode(data, count, head_dim, original.dtype)
    rounded = largest + exact.abs() * ROUNDING[original.dtype] + SMALLEST_HALF
    assert bool(((decoded.double() - original.double()).abs() <= rounded).all())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([4, 12, 32, 48, 192, *SIZES]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    kinds,
    exponents,
    dtypes,
    seeds,
)
def test_int4_and_int8_stay_within_their_bound(bits, head_dim, leading, kind, exponent, dtype, seed):
    original = vectors((*leading, head_dim), kind, 10.0**exponent, dtype, seed)
    assert_within(Grouped(bits), original, bound_of_ranges(original, int(np.gcd(head_dim, 64)), bits))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from([2, 4]), st.sampled_from(SIZES), st.integers(1, 70), kinds, exponents, dtypes, seeds)
def test_keys_by_channel_stay_within_their_bound(bits, head_dim, count, kind, exponent, dtype, seed):
    original = vectors((2, count, head_dim), kind, 10.0**exponent, dtype, seed)
    largest = bound_of_ranges(original.transpose(-1, -2), BLOCK, bits).transpose(-1, -2)
    assert_within(ByChannel(bits), original, largest)


@pytest.mark.parametrize("name", ROTATED)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.sampled_from(SIZES), kinds, exponents, dtypes, seeds)
def test_rotated_vectors_stay_within_their_bound(name, head_dim, kind, exponent, dtype, seed):
    codec, head = codec_of(name, head_dim), seed % HEADS
    original = vectors((HEADS, 2, head_dim), kind, 10.0**exponent, dtype, seed)
    for of_side, side in (("keys", codec.keys), ("values", codec.values)):
        basis = basis_of(name, of_side, head, head_dim)
        rows = side.encode(original)[head].reshape(2, -1).numpy()
        for row, vector in zip(rows, original[head].double().numpy(), strict=True):
            found, _ = basis.elements(row)
            error = float((basis.weights * (found - basis.analysis @ vector) ** 2).sum())
            assert error <= basis.bound(vector) + 1e-36


@pytest.mark.parametrize("name", ["int4-hadamard", "turboquant:4", "klt:5", "klt:6", "block-gtq:4"])
def test_vectors_along_one_direction_of_the_basis_are_not_clipped(name):
    """Their largest element is as many times the root of their mean square as there can be."""
    side, basis = codec_of(name, 64).keys, basis_of(name, "keys", 0, 64)
    for direction in (0, 40):
        vector = torch.from_numpy(basis.synthesis[:, direction]).float()
        row = side.encode(vector.expand(HEADS, 1, 64))[0].numpy()
        found, _ = basis.elements(row)
        error = float((basis.weights * (found - basis.analysis @ vector.double().numpy()) ** 2).sum())
        assert error <= basis.bound(vector.double().numpy())


def test_an_outlying_channel_costs_keys_by_channel_nothing():
    """What the paper observes of keys: a channel that is large for all tokens."""
    original = vectors((BLOCK, 64), "normal", 1.0, torch.float32)
    spoiled = original.clone()
    spoiled[:, 5] = spoiled[:, 5] * 0.1 + 100
    side = ByChannel(4)
    others = [channel for channel in range(64) if channel != 5]
    decoded = [side.decode(side.encode(keys), BLOCK, 64, torch.float32)[:, others] for keys in (original, spoiled)]
    assert torch.equal(*decoded)
    by_token = [Grouped(4).decode(Grouped(4).encode(keys), BLOCK, 64, torch.float32) for keys in (original, spoiled)]
    errors = [float((made - keys)[:, others].norm()) for made, keys in zip(by_token, (original, spoiled), strict=True)]
    assert errors[1] > 10 * errors[0]


def test_bits_go_one_by_one_to_the_pairs_of_most_energy():
    # Units of four pairs with energies 64, 4, 1 and 1 start with a bit each, at costs of 16, 1, 1/4 and 1/4. The first
    # gets three bits more until its cost is 1/4 as well, the second one.
    energy = torch.tensor([16.0] * 4 + [1.0] * 4 + [0.25] * 8)
    assert allocate(energy, 2.0) == [(8, 4), (8, 2), (16, 1)]
    assert allocate(energy, 3.0) == [(8, 5), (8, 3), (16, 2)]
    assert allocate(torch.ones(32), 3) == [(64, 3)]
    flood = torch.tensor([1e30] * 4 + [1.0] * 4)
    assert allocate(flood, 4) == [(8, 7), (8, 1)]
    assert allocate(torch.tensor([1e30] * 4 + [1.0] * 12), 4) == [(8, 8), (16, 3), (8, 2)]


groups = st.lists(st.builds(Group, st.integers(1, 5).map(lambda units: 8 * units), st.integers(1, 8)), min_size=1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groups, st.integers(0, 5), st.integers(0, 3), seeds)
def test_packed_levels_unpack_to_themselves(layout, start, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    packing = Packing(layout, start)
    tops = torch.tensor([2**bits - 1 for size, bits in layout for _ in range(size)])
    levels = (torch.rand(rows, len(tops), generator=generator) * (tops + 1)).floor()
    data = packing.pack(levels)
    assert data.shape == (rows, sum(size * bits // 8 for size, bits in layout))
    stored = torch.cat([torch.full((rows, start), 255, dtype=torch.uint8), data], dim=-1)
    assert torch.equal(packing.unpack(packing.words(stored)).mT, 2 * levels - tops)


@pytest.mark.parametrize(
    ("name", "goal"), [("int4-hadamard", 0.0116), ("turboquant:4", 0.0097), ("turboquant:2", 0.118)]
)
def test_rotated_normal_vectors_lose_no_more_than_the_best_quantizer_of_one_scale(name, goal):
    original = vectors((HEADS, 400, 64), "normal", 1.0, torch.float32)
    side = codec_of(name, 64).keys
    decoded = side.decode(side.encode(original), 400, 64, torch.float32)
    assert float((decoded - original).square().mean() / original.square().mean()) < goal
