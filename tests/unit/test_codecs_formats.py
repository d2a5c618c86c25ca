"""All formats alike: their sizes, that numpy decodes them by their descriptions, and that no number breaks them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_data import (
    ALL,
    BY_BLOCK,
    CALIBRATED,
    DTYPES,
    HEADS,
    KINDS,
    PLAIN,
    SIZES,
    codec_of,
    decode_by_hand,
    statistics,
    vectors,
)

from scissorhands.codec import Codec, RowCodec, VectorCodec, get_codec
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import BLOCK

BY_ROW = [*PLAIN, *CALIBRATED]
# What may differ between a vector alone and among others: products of matrices are summed in another order.
TIE = 1e-4

names = st.sampled_from(ALL)
sizes = st.sampled_from(SIZES)
dtypes = st.sampled_from(DTYPES)
kinds = st.sampled_from(KINDS)
exponents = st.integers(-8, 4)
seeds = st.integers(0, 99)


def sides(codec: Codec) -> list[tuple[str, VectorCodec]]:
    return [("keys", codec.keys), ("values", codec.values)]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(sizes, dtypes, st.sampled_from([0, 1, 31, 32, 33, 65]))
def test_encoded_vectors_are_as_many_bytes_as_the_format_says(name, head_dim, dtype, count):
    codec = codec_of(name, head_dim)
    sizes_of_one = codec.format.key_bytes(head_dim, dtype.itemsize), codec.format.value_bytes(head_dim, dtype.itemsize)
    assert codec.format.slot_bytes(head_dim, dtype.itemsize) == sum(sizes_of_one)
    original = vectors((HEADS, count, head_dim), "normal", 1.0, dtype)
    for (_, side), of_one in zip(sides(codec), sizes_of_one, strict=True):
        data = side.encode(original)
        assert data.dtype == torch.uint8
        assert data.shape == (HEADS, side.block_bytes(count, head_dim, dtype))
        decoded = side.decode(data, count, head_dim, dtype)
        assert (decoded.shape, decoded.dtype) == (original.shape, dtype)
        if isinstance(side, RowCodec):
            assert side.row_bytes(head_dim, dtype) == of_one
            assert side.encode_rows(original).shape == (HEADS, count, of_one)
        else:
            assert side.block_bytes(BLOCK * 3, head_dim, dtype) == BLOCK * 3 * of_one
            assert side.block_bytes(count, head_dim, dtype) >= count * of_one


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(sizes, kinds, exponents, dtypes, seeds)
def test_numpy_decodes_every_format_by_its_description(name, head_dim, kind, exponent, dtype, seed):
    codec, count = codec_of(name, head_dim), 35 if name in BY_BLOCK else 2
    original = vectors((HEADS, count, head_dim), kind, 10.0**exponent, dtype, seed)
    head = seed % HEADS
    for of_side, side in sides(codec):
        data = side.encode(original)
        decoded = side.decode(data, count, head_dim, torch.float32 if name != "none" else dtype)[head].double().numpy()
        expected = decode_by_hand(name, of_side, head, data[head].numpy(), (count, head_dim), dtype)
        tolerance = 1e-5 * np.abs(expected).max(axis=1, keepdims=True) + 1e-30
        assert (np.abs(decoded - expected) <= tolerance).all()


@pytest.mark.parametrize("name", BY_ROW)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(sizes, kinds, exponents, dtypes, seeds)
def test_rows_encoded_one_at_a_time_are_those_encoded_together(name, head_dim, kind, exponent, dtype, seed):
    codec = codec_of(name, head_dim)
    original = vectors((2, HEADS, 5, head_dim), kind, 10.0**exponent, dtype, seed)
    for _, side in sides(codec):
        assert isinstance(side, RowCodec)
        together = side.encode(original).reshape(2, HEADS, 5, -1)
        alone = torch.stack([side.encode_rows(original[:, :, at : at + 1]) for at in range(5)], dim=3).squeeze(2)
        decoded, of_alone = (
            side.decode(data.flatten(-2), 5, head_dim, torch.float32 if name != "none" else dtype).double()
            for data in (together, alone)
        )
        if name in {"none", "int4", "int8"}:
            assert torch.equal(alone, together)
        # A rotated constant is zero in most elements, halfway between two levels.
        ties = 1.0 if kind == "constant" else 0.1
        assert (together != alone).any(dim=-1).float().mean() <= ties
        error, error_alone = ((made - original.double()).square().sum(dim=-1) for made in (decoded, of_alone))
        torch.testing.assert_close(error_alone, error, rtol=0.1, atol=1e-12)


@pytest.mark.parametrize("name", BY_ROW)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(sizes, seeds)
def test_a_head_alone_is_encoded_as_among_others(name, head_dim, seed):
    codec = codec_of(name, head_dim)
    original = vectors((HEADS, 4, head_dim), "normal", 1.0, torch.float32, seed)
    for (_, side), (_, alone) in zip(sides(codec), sides(codec.of_head(seed % HEADS)), strict=True):
        data, own = side.encode(original)[seed % HEADS], original[seed % HEADS]
        decoded = side.decode(side.encode(original), 4, head_dim, torch.float32)[seed % HEADS]
        torch.testing.assert_close(alone.decode(data, 4, head_dim, torch.float32), decoded)
        of_alone = alone.decode(alone.encode(own), 4, head_dim, torch.float32)
        torch.testing.assert_close((of_alone - own).norm(), (decoded - own).norm(), rtol=TIE, atol=0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(BY_BLOCK), sizes, st.integers(0, 3), st.integers(0, 40), dtypes, seeds)
def test_blocks_encoded_one_after_the_other_are_those_encoded_together(name, head_dim, blocks, rest, dtype, seed):
    side = codec_of(name, head_dim).keys
    original = vectors((HEADS, BLOCK * blocks + rest, head_dim), "outlier_channel", 1.0, dtype, seed)
    first, second = original.split([BLOCK * blocks, rest], dim=1)
    together = side.encode(original)
    assert torch.equal(together, torch.cat([side.encode(first), side.encode(second)], dim=-1))
    decoded = [side.decode(side.encode(part), part.shape[1], head_dim, dtype) for part in (first, second)]
    assert torch.equal(side.decode(together, original.shape[1], head_dim, dtype), torch.cat(decoded, dim=1))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(sizes, kinds, dtypes, st.sampled_from([1e-38, 1e-20, 1e-8, 1.0, 1e4, 1e20, 3e38]), seeds)
def test_finite_numbers_of_any_size_stay_finite(name, head_dim, kind, dtype, magnitude, seed):
    limit = torch.finfo(dtype).max
    original = (vectors((HEADS, 3, head_dim), kind, 1.0, torch.float32, seed).double() * magnitude).clamp(-limit, limit)
    original = original.to(dtype)
    assert bool(torch.isfinite(original).all())
    codec = codec_of(name, head_dim)
    for _, side in sides(codec):
        data = side.encode(original)
        for into in {dtype} if name == "none" else DTYPES:
            assert bool(torch.isfinite(side.decode(data, 3, head_dim, into)).all()), into


@settings(max_examples=60, deadline=None, derandomize=True)
@given(names, dtypes, st.sampled_from([float("nan"), float("inf"), float("-inf")]), st.integers(0, 3 * 33 * 64 - 1))
def test_a_number_that_is_not_finite_is_refused(name, dtype, wrong, place):
    spoiled = torch.zeros(HEADS, 33, 64, dtype=dtype)
    spoiled.view(-1)[place] = wrong
    for _, side in sides(codec_of(name, 64)):
        with pytest.raises(InvalidRequestError, match="NaN or infinity"):
            side.encode(spoiled)


@pytest.mark.parametrize("name", BY_ROW)
def test_scores_and_sums_in_the_codecs_basis_are_those_of_decoded_vectors(name):
    codec, original = codec_of(name, 64), vectors((2, HEADS, 9, 64), "outliers", 1.0, torch.float32)
    queries = vectors((2, HEADS, 4, 64), "normal", 1.0, torch.float32, seed=1)
    weights = torch.rand(2, HEADS, 4, 9, generator=torch.Generator().manual_seed(2))
    for _, side in sides(codec):
        assert isinstance(side, RowCodec)
        rows = side.encode_rows(original)
        decoded = side.decode(rows.flatten(-2), 9, 64, torch.float32)
        numbers, scale = side.unpack(rows, 64, torch.float32)
        scaled = numbers if scale is None else numbers * scale.unsqueeze(-1)
        scores = side.project(queries) @ scaled.transpose(-1, -2)
        torch.testing.assert_close(scores, queries @ decoded.transpose(-1, -2), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(side.restore(weights @ scaled), weights @ decoded, rtol=1e-4, atol=1e-3)


def test_calibrated_formats_need_statistics_and_block_gtq_rotary_positions():
    for name in ("klt:3", "block-gtq:3"):
        with pytest.raises(InvalidRequestError, match="needs a model's statistics: run scissorhands calibrate"):
            get_codec(name, 64)
    unrotated = statistics(64, rotary=False)
    assert get_codec("klt:3", 64, unrotated).name == "klt:k3v3"
    with pytest.raises(InvalidRequestError, match="block-gtq needs rotary positions"):
        get_codec("block-gtq:3", 64, unrotated)


def test_other_statistics_are_another_version():
    versions = {get_codec("klt:3", 64, found).version for found in (statistics(64), statistics(64, 2))}
    assert len(versions) == 2
    assert all(version.startswith(get_codec("int4", 64).version + "-") for version in versions)
