"""Segments of evicted slots: what is decoded is what the codec makes of each vector."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_data import ALL, CALIBRATED, DTYPES, HEADS, PLAIN, codec_of

from scissorhands.archive import decode_section, encode_segment
from scissorhands.codec import Codec, RowCodec
from scissorhands.errors import CorruptSegmentError, InvalidRequestError
from scissorhands.segment import SegmentIdentity, check_section, check_segment, header_size, parse_header
from scissorhands.slots import Slots

HEAD_DIM = 16


def identity(codec: Codec) -> SegmentIdentity:
    return SegmentIdentity(
        model="a1",
        tokenizer="b2",
        dtype="float32",
        policy="scissorhands:default",
        layer_slots="8 8",
        codec=codec.name,
        codec_version=codec.version,
        tokens="c3",
        tenant="someone",
        session_id="0123",
    )


def evicted(dropped: list[int], kv_heads: int = HEADS, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32):
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


def segment(name: str, layers: list[Slots]) -> bytes:
    codec = codec_of(name, HEAD_DIM)
    return encode_segment(identity(codec), 4, 99, layers, codec, HEAD_DIM)


def section_of(data: bytes, layer: int, head: int) -> tuple[bytes, int]:
    """Return a section, and the number of its slots."""
    section = check_segment(data).section(layer, head)
    part = data[section.offset : section.offset + section.size]
    check_section(section, part)
    return part, section.slots


@pytest.mark.parametrize(("name", "dtype"), list(zip(ALL, itertools.cycle(DTYPES), strict=False)))
def test_sections_decode_to_what_the_codec_makes_of_each_head(name, dtype):
    codec, dropped = codec_of(name, HEAD_DIM), [1, 37, 0, 32]
    layers = evicted(dropped, dtype=dtype)
    data = segment(name, layers)
    header = check_segment(data)
    assert header.identity == identity(codec)
    assert (header.epoch, header.step) == (4, 99)
    assert (header.layers, header.kv_heads, header.head_dim) == (len(dropped), HEADS, HEAD_DIM)
    assert header.slots == HEADS * sum(dropped)
    for index, slots in enumerate(layers):
        made = [
            side.decode(side.encode(vectors), slots.positions.shape[1], HEAD_DIM, dtype)
            for side, vectors in ((codec.keys, slots.keys), (codec.values, slots.values))
        ]
        for head in range(HEADS):
            part, count = section_of(data, index, head)
            positions, *decoded = decode_section(part, count, codec.of_head(head), HEAD_DIM, dtype)
            assert positions.dtype == torch.int64
            assert positions.tolist() == slots.positions[head].tolist()
            for found, expected in zip(decoded, made, strict=True):
                torch.testing.assert_close(found, expected[head])


@pytest.mark.parametrize("name", [*PLAIN, *CALIBRATED])
def test_slots_that_were_resident_packed_are_stored_as_they_were(name):
    codec = codec_of(name, HEAD_DIM)
    layers = evicted([3, 8])
    assert isinstance(codec.keys, RowCodec)
    assert isinstance(codec.values, RowCodec)
    packed = [
        replace(
            slots, keys=codec.keys.encode_rows(slots.keys), values=codec.values.encode_rows(slots.values), packed=True
        )
        for slots in layers
    ]
    assert segment(name, packed) == segment(name, layers)


def test_the_header_can_be_read_from_the_beginning_alone():
    data = segment("int4", evicted([2, 2]))
    size = header_size(data[:64])
    assert parse_header(data[:size]) == check_segment(data)
    with pytest.raises(CorruptSegmentError, match="truncated"):
        parse_header(data[: size - 1])


def test_positions_stand_first_and_keys_before_values():
    layers = evicted([2])
    part, count = section_of(segment("none", layers), 0, 1)
    assert part == b"".join(
        part[1].numpy().tobytes() for part in (layers[0].positions, layers[0].keys, layers[0].values)
    )
    assert count == 2


@pytest.mark.parametrize("spoiled", ["keys", "values"])
def test_numbers_that_are_not_finite_are_refused(spoiled):
    layers = evicted([3, 3])
    wrong = getattr(layers[1], spoiled).clone()
    wrong[2, 2, 15] = float("nan")
    layers[1] = replace(layers[1], **{spoiled: wrong})
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        segment("int4", layers)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(ALL), st.sampled_from([1, 2, 33]), st.data())
def test_sections_cut_short_grown_or_of_another_count_are_refused(name, slots, data):
    """Whatever their checksum says: the size follows from the slots alone, and is checked first."""
    codec = codec_of(name, HEAD_DIM).of_head(0)
    part, count = section_of(segment(name, evicted([slots])), 0, 0)
    assert count == slots
    cut = data.draw(st.integers(0, len(part) - 1))
    grown = part + bytes(data.draw(st.integers(1, 100)))
    for wrong in (part[:cut], grown):
        with pytest.raises(CorruptSegmentError, match=f"section of {slots} slots is {len(wrong)} bytes instead of"):
            decode_section(wrong, slots, codec, HEAD_DIM, torch.float32)
    # The largest number that a table can tell: to allocate for it would end the process.
    for forged in (0, slots - 1, slots + 1, 2**32 - 1):
        if forged != slots:
            with pytest.raises(CorruptSegmentError, match=f"section of {forged} slots is {len(part)} bytes"):
                decode_section(part, forged, codec, HEAD_DIM, torch.float32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(ALL), st.sampled_from([0, 1, 5]), st.data())
def test_segments_cut_short_grown_or_spoiled_are_refused(name, slots, data):
    whole = segment(name, evicted([slots]))
    place = data.draw(st.integers(0, len(whole) - 1))
    spoiled = bytearray(whole)
    spoiled[place] ^= data.draw(st.integers(1, 255))
    for wrong in (whole[:place], whole + bytes(data.draw(st.integers(1, 50))), bytes(spoiled)):
        with pytest.raises(CorruptSegmentError):
            check_segment(wrong)


def test_every_byte_of_a_segment_is_guarded():
    data = segment("int4", evicted([1]))
    for at in range(len(data)):
        with pytest.raises(CorruptSegmentError):
            check_segment(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])


@pytest.mark.parametrize("name", ALL)
def test_any_bytes_of_the_right_size_decode_to_the_right_shape(name):
    """A checksum can be forged; what comes out is then wrong, but nothing fails or grows."""
    codec = codec_of(name, HEAD_DIM).of_head(0)
    part, count = section_of(segment(name, evicted([33])), 0, 0)
    noise = np.random.default_rng(0).integers(0, 256, len(part), dtype=np.uint8).tobytes()
    _, keys, values = decode_section(noise, count, codec, HEAD_DIM, torch.float32)
    assert keys.shape == values.shape == (33, HEAD_DIM)
