"""The segment format: what goes in comes out, and nothing that was tampered with does."""

import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.errors import CorruptSegmentError
from scissorhands.segment import (
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_SEGMENT_BYTES,
    START_BYTES,
    SegmentIdentity,
    build_segment,
    check_section,
    check_segment,
    header_size,
    parse_header,
)

IDENTITY = SegmentIdentity(
    model="a" * 64,
    tokenizer="b" * 64,
    dtype="float32",
    policy="scissorhands:default",
    layer_slots="64,64",
    codec="int4",
    codec_version="1",
    tokens="c" * 64,
    tenant="default",
    session_id="Straße-1",
)
SHAPE = (2, 2, 8)
SECTIONS = [(2, b"first section"), (0, b""), (1, b"third"), (3, bytes(range(256)))]
_START = struct.Struct("<4sHIQ")


def segment(identity=IDENTITY, sections=SECTIONS, shape=SHAPE):
    return build_segment(identity, epoch=7, step=300, shape=shape, sections=sections)


def header_bytes(data):
    return header_size(data[:START_BYTES])


def with_valid_checksum(header, rest=b""):
    """Return the header with its checksum made right again, so that what lies behind the checksum is tested."""
    body = bytes(header[:-4])
    return body + struct.pack("<I", zlib.crc32(body)) + rest


def test_round_trip():
    data = segment()
    header = check_segment(data)
    assert header.identity == IDENTITY
    assert (header.epoch, header.step, header.layers, header.kv_heads, header.head_dim) == (7, 300, 2, 2, 8)
    assert header.size == len(data)
    assert header.slots == 6
    found = [(part.slots, data[part.offset : part.offset + part.size]) for part in header.sections]
    assert found == SECTIONS


def test_a_section_can_be_read_alone():
    data = segment()
    header = parse_header(data[: header_bytes(data)])
    part = header.section(1, 1)
    own = data[part.offset : part.offset + part.size]
    check_section(part, own)
    assert own == bytes(range(256))
    with pytest.raises(CorruptSegmentError, match="checksum"):
        check_section(part, own[:-1] + b"x")
    with pytest.raises(CorruptSegmentError, match="instead of"):
        check_section(part, own[:-1])


@pytest.mark.parametrize(("layer", "kv_head"), [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_there_is_no_section_beyond_the_shape(layer, kv_head):
    with pytest.raises(CorruptSegmentError, match="no section"):
        check_segment(segment()).section(layer, kv_head)


def test_equal_segments_are_equal_bytes():
    assert segment() == segment()


def test_every_truncation_is_refused():
    data = segment()
    for length in range(len(data)):
        with pytest.raises(CorruptSegmentError):
            check_segment(data[:length])


def test_bytes_behind_the_end_are_refused():
    with pytest.raises(CorruptSegmentError, match="instead of"):
        check_segment(segment() + b"x")


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_anywhere_is_refused(bit):
    data = bytearray(segment())
    for place in range(len(data)):
        data[place] ^= 1 << bit
        with pytest.raises(CorruptSegmentError):
            check_segment(bytes(data))
        data[place] ^= 1 << bit
    check_segment(bytes(data))


def test_a_flipped_bit_behind_a_valid_checksum_still_parses_to_something_within_bounds():
    data = segment()
    size = header_bytes(data)
    for place in range(START_BYTES, size - 4):
        for bit in range(8):
            header = bytearray(data[:size])
            header[place] ^= 1 << bit
            try:
                parsed = parse_header(with_valid_checksum(header))
            except CorruptSegmentError:
                continue
            assert sum(part.size for part in parsed.sections) == parsed.size - size


def test_sections_that_exchange_their_places_are_refused():
    data = segment(sections=[(1, b"aaaa"), (1, b"bbbb"), (0, b""), (0, b"")])
    size = header_bytes(data)
    with pytest.raises(CorruptSegmentError, match="checksum"):
        check_segment(data[:size] + data[size + 4 : size + 8] + data[size : size + 4])


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ((b"PK\x03\x04", 2, 300, 300), "magic"),
        ((MAGIC, 3, 300, 300), "version 3"),
        ((MAGIC, 0, 300, 300), "version 0"),
        ((MAGIC, 2, 0, 300), "header size"),
        ((MAGIC, 2, START_BYTES, 300), "header size"),
        ((MAGIC, 2, 301, 300), "header size"),
        ((MAGIC, 2, MAX_HEADER_BYTES + 1, MAX_SEGMENT_BYTES), "header size"),
        ((MAGIC, 2, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF), "header size"),
        ((MAGIC, 2, 300, MAX_SEGMENT_BYTES + 1), "above the limit"),
        ((MAGIC, 2, 300, 0xFFFFFFFFFFFFFFFF), "above the limit"),
    ],
)
def test_hostile_sizes_are_refused_before_anything_is_allocated(start, message):
    data = _START.pack(*start)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptSegmentError, match=message):
            header_size(data)
        with pytest.raises(CorruptSegmentError, match=message):
            parse_header(data + bytes(300))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_hostile_shape_is_refused_before_its_table_is_read():
    data = segment()
    size = header_bytes(data)
    header = bytearray(data[:size])
    counts = size - 4 - len(SECTIONS) * 20 - struct.calcsize("<IIHHH")
    struct.pack_into("<HH", header, counts + 8, 0xFFFF, 0xFFFF)
    with pytest.raises(CorruptSegmentError, match="table does not fit"):
        parse_header(with_valid_checksum(header))


def test_a_hostile_text_length_is_refused():
    data = segment()
    header = bytearray(data[: header_bytes(data)])
    struct.pack_into("<H", header, START_BYTES, 0xFFFF)
    with pytest.raises(CorruptSegmentError, match="above the limit"):
        parse_header(with_valid_checksum(header))


def test_a_text_that_is_not_utf8_is_refused():
    data = segment()
    header = bytearray(data[: header_bytes(data)])
    header[START_BYTES + 2] = 0xFF
    with pytest.raises(CorruptSegmentError, match="malformed"):
        parse_header(with_valid_checksum(header))


def test_sections_that_overlap_or_leave_gaps_are_refused():
    data = segment()
    size = header_bytes(data)
    table = size - 4 - len(SECTIONS) * 20
    for shift in (-1, 1, 1 << 40):
        header = bytearray(data[:size])
        (offset,) = struct.unpack_from("<Q", header, table)
        struct.pack_into("<Q", header, table, offset + shift)
        with pytest.raises(CorruptSegmentError, match="contiguous"):
            parse_header(with_valid_checksum(header))


def test_sections_that_do_not_fill_the_segment_are_refused():
    data = segment()
    size = header_bytes(data)
    header = bytearray(data[:size])
    struct.pack_into("<4sHIQ", header, 0, MAGIC, 2, size, len(data) + 1)
    with pytest.raises(CorruptSegmentError, match="do not fill"):
        parse_header(with_valid_checksum(header))


def test_an_identity_that_is_too_long_is_never_built():
    long = SegmentIdentity(**{**IDENTITY.__dict__, "policy": "x" * 5000})
    with pytest.raises(ValueError, match="policy"):
        segment(identity=long)


def test_sections_that_do_not_match_the_shape_are_never_built():
    with pytest.raises(ValueError, match="sections"):
        segment(shape=(3, 2, 8))


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=400))
def test_noise_is_refused(noise):
    for data in (noise, MAGIC + noise, MAGIC + b"\x02\x00" + noise):
        with pytest.raises(CorruptSegmentError):
            check_segment(data)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=64)), min_size=1, max_size=12),
    st.text(max_size=40),
)
def test_any_sections_round_trip(sections, name):
    identity = SegmentIdentity(**{**IDENTITY.__dict__, "session_id": name})
    data = build_segment(identity, 0, 1, (1, len(sections), 4), sections)
    header = check_segment(data)
    assert header.identity.session_id == name
    assert [(part.slots, data[part.offset : part.offset + part.size]) for part in header.sections] == sections
