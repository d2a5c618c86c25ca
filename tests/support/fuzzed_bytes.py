"""Broken segments and manifests: what makes them, and the decoders that must refuse them in order."""

import struct
import tracemalloc
import zlib
from typing import NamedTuple

from scissorhands.errors import CorruptRowError, CorruptSegmentError
from scissorhands.framed import MAX_MANIFEST_BYTES
from scissorhands.prefix import PrefixIdentity, PrefixManifest
from scissorhands.segment import START_BYTES, SegmentIdentity, build_segment, check_segment, parse_header
from scissorhands.summary import read_summary, summary_bytes
from scissorhands.suspended import Manifest, SuspendedIdentity, describe

_SEGMENT_SIZES = struct.Struct("<IQ")
_MANIFEST_SIZE = struct.Struct("<I")
_SIZES_AT = 6
_CRC = struct.Struct("<I")

# What reading may allocate: some pages, and for each byte of input what the densest table becomes as Python objects.
MOST_BYTES, MOST_BYTES_A_BYTE = 256 << 10, 64


class Edit(NamedTuple):
    """One change of some bytes.

    Args:
        at: Where, as a part of their length.
        removed: Bytes that go.
        inserted: What comes in their place.
    """

    at: float
    removed: int
    inserted: bytes


def edited(data, edits):
    """Return ``data`` after some edits."""
    for edit in edits:
        start = int(edit.at * len(data))
        data = data[:start] + edit.inserted + data[start + edit.removed :]
    return data


def random_edits(rng):
    """Return a few edits; most replace bytes by as many."""
    edits = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        inserted = rng.choice((rng.randbytes(rng.choice((1, 2, 4, 8))), b"\xff" * 4, bytes(4)))
        edits.append(Edit(rng.random(), rng.choice((len(inserted), len(inserted), 0, 16)), inserted))
    return edits


def sealed_segment(data):
    """Make sizes and checksum of a segment's header right, so that what lies behind them is read."""
    if len(data) < START_BYTES + _CRC.size:
        return data
    size, _ = _SEGMENT_SIZES.unpack_from(data, _SIZES_AT)
    size = size if START_BYTES + _CRC.size <= size <= len(data) else len(data)
    checked = data[:_SIZES_AT] + _SEGMENT_SIZES.pack(size, len(data)) + data[START_BYTES : size - _CRC.size]
    return checked + _CRC.pack(zlib.crc32(checked)) + data[size:]


def sealed_manifest(data):
    """Make size and checksum of a manifest right."""
    body = _SIZES_AT + _MANIFEST_SIZE.size
    if len(data) < body + _CRC.size:
        return data
    checked = data[:_SIZES_AT] + _MANIFEST_SIZE.pack(len(data)) + data[body : -_CRC.size]
    return checked + _CRC.pack(zlib.crc32(checked))


def read_segment(data):
    """Read a segment and its summary; tell whether it was whole. Other errors than its own are faults."""
    try:
        header = parse_header(data)
        start, size = header.summary.offset, header.summary.size
        read_summary(data[start : start + size], [section.slots for section in header.sections], header.head_dim)
        check_segment(data)
    except CorruptSegmentError:
        return False
    return True


def read_row(data):
    """Read a suspended row's manifest; tell whether it was whole. A whole one is written as it was."""
    return _read_manifest(Manifest, data)


def read_prefix(data):
    """Read a prefix's manifest; tell whether it was whole. A whole one is written as it was."""
    return _read_manifest(PrefixManifest, data)


def _read_manifest(kind, data):
    try:
        manifest = kind.parse(data)
    except CorruptRowError:
        return False
    assert manifest.pack() == data
    return True


# By name: how bytes are read, and how they are sealed.
DECODERS = {
    "segment": (read_segment, sealed_segment),
    "row": (read_row, sealed_manifest),
    "prefix": (read_prefix, sealed_manifest),
}


def allocated(read, data):
    """Return how many bytes ``read`` held at most while it read ``data``."""
    tracemalloc.start()
    try:
        read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def most_allocated(data):
    """Return how many bytes reading ``data`` may allocate."""
    return MOST_BYTES + MOST_BYTES_A_BYTE * min(len(data), MAX_MANIFEST_BYTES)


def examples(name):
    """Return whole bytes for a decoder."""
    pieces = [b"some bytes", bytes(300)]
    if name == "segment":
        identity = SegmentIdentity("m" * 8, "t", "float32", "h2o:", "8,8", "int4", "1", "0" * 8, "default", "s1")
        summary = bytes(summary_bytes([1, 0, 17, 2], 8))
        sections = [(1, b"a"), (0, b""), (17, b"section"), (2, bytes(9))]
        return [
            build_segment(identity, 1, 9, (2, 2, 8), sections),
            build_segment(identity, 1, 9, (2, 2, 8), sections, summary),
            build_segment(identity, 0, 1, (0, 0, 0), []),
        ]
    if name == "row":
        identity = SuspendedIdentity(**dict.fromkeys(SuspendedIdentity.__dataclass_fields__, "text"))
        return [
            Manifest(identity, 3, 1, 2, (2, 3), b"grant", describe(pieces)).pack(),
            Manifest(identity, 0, 0, 0, (), b"", ()).pack(),
        ]
    identity = PrefixIdentity(**dict.fromkeys(PrefixIdentity.__dataclass_fields__, "text"))
    return [
        PrefixManifest(bytes(32), identity, 2, 9, 1, (4, 5), describe(pieces), describe(pieces[:1])).pack(),
        PrefixManifest(bytes(32), identity, 0, 1, 0, (), (), ()).pack(),
    ]
