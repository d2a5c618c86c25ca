"""Codecs without a rotation, by hand and at their edges."""

import numpy as np
import pytest
import torch
from support.codec_data import DTYPES, SIZES, vectors

from scissorhands.codec import RowCodec
from scissorhands.codec.grouped import Grouped
from scissorhands.codec.kivi import ByChannel
from scissorhands.codec.none import Exact
from scissorhands.codec.packing import packing_of


def decode_rows(codec: RowCodec, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode ``[..., row_bytes]``, each vector on its own."""
    return codec.decode(data, 1, head_dim, dtype).squeeze(-2)


def halves(*numbers: float) -> list[int]:
    return np.array(numbers, "<f2").view(np.uint8).tolist()


def test_int4_by_hand():
    # One group of two: minimum -1, step 2/15; -1 is level 0 and 1 is level 15.
    codec = Grouped(4)
    data = codec.encode_rows(torch.tensor([-1.0, 1.0]))
    step = float(np.float16(2 / 15))
    assert data.tolist() == [*halves(-1, step), 0xF0]
    assert decode_rows(codec, data, 2, torch.float32).tolist() == pytest.approx([-1, -1 + 15 * step])
    assert codec.row_bytes(64, torch.float32) == 36
    assert codec.row_bytes(128, torch.float16) == 72
    assert codec.row_bytes(80, torch.float16) == 60


def test_keys_by_channel_by_hand():
    # Four channels of two keys: 0 and 3, 1 and 1, -1 and 2, 6 and 0. Of 2 bits, their levels are 0 or 3.
    codec = ByChannel(2)
    data = codec.encode(torch.tensor([[0.0, 1.0, -1.0, 6.0], [3.0, 1.0, 2.0, 0.0]]))
    assert data.tolist() == [*halves(0, 1, -1, 0), *halves(1, 0, 1, 2), 0b11000000, 0b00110011]
    assert codec.decode(data, 2, 4, torch.float32).tolist() == [[0, 1, -1, 6], [3, 1, 2, 0]]
    assert codec.block_bytes(32, 64, torch.float32) == 32 * 16 + 64 * 4
    assert codec.block_bytes(33, 64, torch.float32) == 33 * 16 + 2 * 64 * 4


def test_levels_are_packed_plane_by_plane():
    levels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]).float()
    # The upper two bits are 0, 0, 1, 1, 2, 2, 3, 3: two bytes of four planes. The lowest: one byte of eight.
    assert packing_of(8, 3).pack(levels).tolist() == [0b11_10_01_00, 0b11_10_01_00, 0b10101010]
    assert packing_of(8, 4).pack(levels).tolist() == [0x40, 0x51, 0x62, 0x73]
    assert packing_of(8, 1).pack(levels % 2).tolist() == [0b10101010]


def test_rows_do_not_depend_on_each_other_or_on_strides():
    codec = Grouped(4)
    original = vectors((5, 3, 64), "outliers", 1.0, torch.float32)
    whole = codec.encode_rows(original)
    decoded = decode_rows(codec, whole, 64, torch.float32)
    for place in np.ndindex(5, 3):
        assert torch.equal(codec.encode_rows(original[place]), whole[place])
        assert torch.equal(decode_rows(codec, whole[place], 64, torch.float32), decoded[place])
    assert torch.equal(codec.encode_rows(original.transpose(0, 1)), whole.transpose(0, 1))


@pytest.mark.parametrize("codec", [Grouped(2), Grouped(4), Grouped(8), ByChannel(2), ByChannel(4)])
def test_equal_elements_of_a_group_are_exact(codec):
    for value in (0.0, 1.0, -0.375, 65504.0):
        original = torch.full((4, 64), value)
        assert torch.equal(codec.decode(codec.encode(original), 4, 64, torch.float32), original)


@pytest.mark.parametrize("codec", [Grouped(4), Grouped(8), ByChannel(4)])
def test_ranges_saturate_beyond_float16(codec):
    original = torch.tensor([[3e38, -3e38] * 32, [1e5, 0.0] * 32])
    data = codec.encode(original)
    for dtype in DTYPES:
        decoded = codec.decode(data, 2, 64, dtype)
        assert bool((decoded.float().abs() <= 65536).all()), "65504 is 65536 in bfloat16"
    assert decoded[0].sign().tolist() == original[0].sign().tolist()


@pytest.mark.parametrize("head_dim", [1, 3, *SIZES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_compression_is_exact(head_dim, dtype):
    codec = Exact()
    original = vectors((3, 4, head_dim), "outliers", 1e3, dtype).transpose(0, 1)
    data = codec.encode_rows(original)
    assert data.shape == (4, 3, codec.row_bytes(head_dim, dtype))
    assert torch.equal(decode_rows(codec, data, head_dim, dtype), original)
    if dtype is not torch.bfloat16:
        assert data.numpy().tobytes() == original.numpy().tobytes()
