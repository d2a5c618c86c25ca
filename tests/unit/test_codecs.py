"""Codecs: round trips within the bounds that they state, against a decoder written in numpy."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.codec import RowCodec, get_codec
from scissorhands.codec.grouped import Grouped
from scissorhands.codec.none import Exact
from scissorhands.errors import InvalidRequestError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [2, 6, 32, 48, 64, 80, 96, 128, 192, 256]
KINDS = ["normal", "outliers", "constant", "one_sided", "zeros", "two_scales"]
# Half the distance between neighbors of a type, relatively.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_HALF = 2.0**-25


def vectors(shape: tuple[int, ...], kind: str, magnitude: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random vectors of a kind, none beyond what float16 holds."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator)
    if kind == "outliers":
        made *= torch.where(torch.rand(shape, generator=generator) < 0.02, 100.0, 1.0)
    elif kind == "constant":
        made = torch.ones(shape) * made[..., :1]
    elif kind == "one_sided":
        made = made.abs() + 3
    elif kind == "zeros":
        made.zero_()
    elif kind == "two_scales":
        made[..., ::2] *= 1e-4
    return (made * magnitude).clamp(-65000, 65000).to(dtype)


def decode_in_numpy(data: npt.NDArray[np.uint8], head_dim: int) -> npt.NDArray[np.float64]:
    """Decode one vector's bytes as the format is described: minima, steps, then a byte for an element of each half."""
    group = next(size for size in range(64, 0, -1) if head_dim % size == 0 and 64 % size == 0)
    groups = head_dim // group
    low = data[: 2 * groups].view("<f2").astype(np.float64)
    step = data[2 * groups : 4 * groups].view("<f2").astype(np.float64)
    decoded = np.zeros(head_dim)
    for element in range(head_dim):
        byte = int(data[4 * groups + element % (head_dim // 2)])
        level = byte % 16 if element < head_dim // 2 else byte // 16
        decoded[element] = low[element // group] + step[element // group] * level
    return decoded


def decode_rows(codec: RowCodec, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode ``[..., row_bytes]``, each vector on its own."""
    return codec.decode(data, 1, head_dim, dtype).squeeze(-2)


def bound(original: torch.Tensor) -> torch.Tensor:
    """Return the largest error that int4 states for each element of ``[..., head_dim]``, before rounding to a type."""
    head_dim = original.shape[-1]
    group = int(np.gcd(head_dim, 64))
    groups = original.double().unflatten(-1, (head_dim // group, group))
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / 15
    of_low = (low.abs() * 2.0**-11).clamp_min(SMALLEST_HALF)
    of_step = (step * 2.0**-11).clamp_min(SMALLEST_HALF)
    return (step / 2 + of_low + 15 * of_step).unsqueeze(-1).expand_as(groups).flatten(-2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    head_dim=st.sampled_from(SIZES),
    leading=st.lists(st.integers(0, 5), max_size=3),
    kind=st.sampled_from(KINDS),
    exponent=st.integers(-8, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_int4_stays_within_its_bound(head_dim, leading, kind, exponent, dtype, seed):
    original = vectors((*leading, head_dim), kind, 10.0**exponent, dtype, seed)
    codec = Grouped(4)
    data = codec.encode_rows(original)
    assert data.dtype == torch.uint8
    assert data.shape == (*leading, codec.row_bytes(head_dim, dtype))
    exact = decode_rows(codec, data, head_dim, torch.float32)
    largest = bound(original)
    assert bool(((exact.double() - original.double()).abs() <= largest * (1 + 1e-6)).all())

    decoded = decode_rows(codec, data, head_dim, dtype)
    assert decoded.dtype == dtype
    assert decoded.shape == original.shape
    rounded = largest + exact.double().abs() * ROUNDING[dtype] + SMALLEST_HALF
    assert bool(((decoded.double() - original.double()).abs() <= rounded).all())


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_int4_decodes_as_its_format_says(head_dim, kind):
    codec = Grouped(4)
    data = codec.encode_rows(vectors((7, head_dim), kind, 3.0, torch.float32))
    decoded = decode_rows(codec, data, head_dim, torch.float32).numpy()
    for row, expected in zip(data.numpy(), decoded, strict=True):
        np.testing.assert_allclose(decode_in_numpy(row, head_dim), expected, rtol=1e-6, atol=1e-30)


def test_int4_by_hand():
    # One group of two: minimum -1, step 2/15; -1 is level 0 and 1 is level 15.
    codec = Grouped(4)
    data = codec.encode_rows(torch.tensor([-1.0, 1.0]))
    step = np.float16(2 / 15)
    assert data.tolist() == [*np.array([-1, step], "<f2").view(np.uint8), 0xF0]
    assert decode_rows(codec, data, 2, torch.float32).tolist() == pytest.approx([-1, -1 + 15 * float(step)])
    assert codec.row_bytes(64, torch.float32) == 36
    assert codec.row_bytes(128, torch.float16) == 72
    assert codec.row_bytes(80, torch.float16) == 60


def test_int4_rows_do_not_depend_on_each_other():
    codec = Grouped(4)
    original = vectors((5, 3, 64), "outliers", 1.0, torch.float32)
    whole = codec.encode_rows(original)
    decoded = decode_rows(codec, whole, 64, torch.float32)
    for place in np.ndindex(5, 3):
        assert torch.equal(codec.encode_rows(original[place]), whole[place])
        assert torch.equal(decode_rows(codec, whole[place], 64, torch.float32), decoded[place])
    assert torch.equal(codec.encode_rows(original.transpose(0, 1)), whole.transpose(0, 1)), "strides do not matter"


def test_int4_encodes_a_group_of_equal_elements_exactly():
    for value in (0.0, 1.0, -0.375, 65504.0):
        original = torch.full((4, 64), value)
        assert torch.equal(decode_rows(Grouped(4), Grouped(4).encode_rows(original), 64, torch.float32), original)


def test_int4_saturates_beyond_float16():
    original = torch.tensor([[3e38, -3e38] * 32, [1e5, 0.0] * 32])
    decoded = decode_rows(Grouped(4), Grouped(4).encode_rows(original), 64, torch.float32)
    assert bool(torch.isfinite(decoded).all())
    assert bool((decoded.abs() <= 65504).all())
    half = decode_rows(Grouped(4), Grouped(4).encode_rows(original), 64, torch.float16)
    assert bool(torch.isfinite(half).all())


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_codec_is_exact(head_dim, dtype):
    codec = Exact()
    original = vectors((3, 4, head_dim), "outliers", 1e3, dtype)
    data = codec.encode_rows(original.transpose(0, 1))
    assert data.shape == (4, 3, codec.row_bytes(head_dim, dtype))
    assert torch.equal(decode_rows(codec, data, head_dim, dtype), original.transpose(0, 1))
    if dtype is not torch.bfloat16:
        assert data.numpy().tobytes() == original.transpose(0, 1).numpy().tobytes()


@pytest.mark.parametrize("name", ["none", "int8", "int4", "int4-hadamard", "turboquant:2"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_are_refused(name, wrong, dtype):
    spoiled = torch.zeros(2, 64, dtype=dtype)
    spoiled[1, 63] = wrong
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        get_codec(name, 64).keys.encode(spoiled)


@pytest.mark.parametrize("head_dim", [1, 3, 63, 65])
def test_int4_refuses_an_odd_size(head_dim):
    with pytest.raises(InvalidRequestError, match=f"multiple of 2, got {head_dim}"):
        get_codec("int4", head_dim)


def test_an_unknown_codec_is_refused():
    with pytest.raises(InvalidRequestError, match="unknown codec 'zip'; allowed: none, int8, int4"):
        get_codec("zip", 64)
