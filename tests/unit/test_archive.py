"""Segments of evicted slots: what is decoded is what the codec makes of each vector."""

from dataclasses import replace

import pytest
import torch

from scissorhands.archive import decode_section, encode_segment
from scissorhands.codec import get_codec
from scissorhands.errors import CorruptSegmentError, InvalidRequestError
from scissorhands.segment import SegmentIdentity, check_section, check_segment, header_size, parse_header
from scissorhands.slots import Slots

CODECS = ["none", "int8", "int4", "int4-hadamard", "turboquant:k4v2"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def identity(codec_name: str) -> SegmentIdentity:
    codec = get_codec(codec_name, 16)
    return SegmentIdentity(
        model="a1",
        tokenizer="b2",
        dtype="float32",
        policy="scissorhands:default",
        layer_slots="8 8",
        codec=codec.name,
        codec_version=str(codec.version),
        tokens="c3",
        tenant="someone",
        session_id="0123",
    )


def evicted(dropped: list[int], kv_heads: int = 3, head_dim: int = 16, dtype: torch.dtype = torch.float32):
    """Return random slots of one layer for each entry of ``dropped``, with that many slots a head."""
    generator = torch.Generator().manual_seed(1)
    layers = []
    for count in dropped:
        keys, values = torch.randn(2, kv_heads, count, head_dim, generator=generator).to(dtype)
        positions = torch.stack(
            [torch.randperm(3000, generator=generator)[:count].sort().values for _ in range(kv_heads)]
        ).to(torch.int32)
        layers.append(Slots(keys, values, positions, torch.zeros(kv_heads, count)))
    return layers


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropped", [[5, 5], [1, 7, 0, 3]], ids=str)
def test_sections_decode_to_what_the_codec_makes_of_each_vector(name, dtype, dropped):
    codec, layers = get_codec(name, 16), evicted(dropped, dtype=dtype)
    data = encode_segment(identity(name), 4, 99, layers, codec, 16)
    header = check_segment(data)
    assert header.identity == identity(name)
    assert (header.epoch, header.step) == (4, 99)
    assert (header.layers, header.kv_heads, header.head_dim) == (len(dropped), 3, 16)
    assert header.slots == 3 * sum(dropped)
    for index, slots in enumerate(layers):
        for head in range(3):
            section = header.section(index, head)
            part = data[section.offset : section.offset + section.size]
            check_section(section, part)
            positions, keys, values = decode_section(part, section.slots, codec, 16, dtype)
            assert positions.dtype == torch.int64
            assert positions.tolist() == slots.positions[head].tolist()
            for side, vectors, decoded in ((codec.keys, slots.keys, keys), (codec.values, slots.values, values)):
                assert torch.equal(decoded, side.decode(side.encode(vectors[head]), section.slots, 16, dtype))


def test_the_header_can_be_read_from_the_beginning_alone():
    data = encode_segment(identity("int4"), 0, 8, evicted([2, 2]), get_codec("int4", 16), 16)
    size = header_size(data[:64])
    assert parse_header(data[:size]) == check_segment(data)
    with pytest.raises(CorruptSegmentError, match="truncated"):
        parse_header(data[: size - 1])


def test_positions_stand_first_and_keys_before_values():
    layers = evicted([2], kv_heads=1, head_dim=2)
    data = encode_segment(identity("none"), 0, 8, layers, get_codec("none", 2), 2)
    section = check_segment(data).section(0, 0)
    expected = b"".join(part.numpy().tobytes() for part in (layers[0].positions, layers[0].keys, layers[0].values))
    assert data[section.offset :] == expected
    assert section.size == 2 * 4 + 2 * 2 * 2 * 4


@pytest.mark.parametrize("spoiled", ["keys", "values"])
def test_numbers_that_are_not_finite_are_refused(spoiled):
    layers = evicted([3, 3])
    wrong = getattr(layers[1], spoiled).clone()
    wrong[2, 2, 15] = float("nan")
    layers[1] = replace(layers[1], **{spoiled: wrong})
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        encode_segment(identity("int4"), 0, 8, layers, get_codec("int4", 16), 16)


@pytest.mark.parametrize("cut", [1, 4, 36])
def test_a_section_of_the_wrong_size_is_refused(cut):
    data = encode_segment(identity("int4"), 0, 8, evicted([2]), get_codec("int4", 16), 16)
    section = check_segment(data).section(0, 2)
    part = data[section.offset : section.offset + section.size]
    for wrong in (part[:-cut], part + part[:cut]):
        with pytest.raises(CorruptSegmentError, match=f"section of 2 slots is {len(wrong)} bytes"):
            decode_section(wrong, section.slots, get_codec("int4", 16), 16, torch.float32)


def test_every_byte_of_a_segment_is_guarded():
    data = encode_segment(identity("int4"), 0, 8, evicted([1]), get_codec("int4", 16), 16)
    for at in range(len(data)):
        with pytest.raises(CorruptSegmentError):
            check_segment(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
