"""The segment: what one plan evicted, encoded, as one string of bytes.

All numbers are little-endian::

    magic "SCSG" | version u16 | header bytes u32 | segment bytes u64       the fixed start
    identity: ten length-prefixed UTF-8 strings, session id, tenant          the rest of the header
    summary bytes u32 | summary crc u32
    epoch u32 | step u32 | layers u16 | kv_heads u16 | head_dim u16
    table: layers * kv_heads times (offset u64, bytes u32, slots u32, crc u32)
    crc u32                                                                  of the header up to here
    summary of the keys                                                      see scissorhands.summary; may be empty
    sections: positions u32 * slots | keys | values                          by layer, then by head

Every size is checked against a limit before anything is allocated. A section can be read alone: its offset is counted
from the start of the segment, and its checksum covers all its bytes. So can the summary, which lies right behind the
header: what a recall looks at is read in one go.
"""

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from isal.isal_zlib import crc32

from scissorhands.errors import CorruptSegmentError
from scissorhands.texts import pack_texts, unpack_texts

MAGIC = b"SCSG"
VERSION = 2
MAX_SEGMENT_BYTES = 1 << 30
MAX_HEADER_BYTES = 16 << 20

_START = struct.Struct("<4sHIQ")
_SUMMARY = struct.Struct("<II")
_COUNTS = struct.Struct("<IIHHH")
_ENTRY = struct.Struct("<QIII")
_CRC = struct.Struct("<I")

START_BYTES = _START.size


@dataclass(frozen=True)
class SegmentIdentity:
    """Everything that must agree before stored slots may be used. A difference is a miss.

    Args:
        model: Hex digest of configuration and weights.
        tokenizer: Hex digest of the tokenizer.
        dtype: Number type of the resident keys and values.
        policy: The policy with its preset and all its numbers.
        layer_slots: The budget of every layer, or a digest of those of all KV heads.
        codec: Name of the codec.
        codec_version: Version of the codec's format.
        tokens: Hex digest of all token ids up to the step.
        tenant: The tenant, as the server derived it.
        session_id: The session.
    """

    model: str
    tokenizer: str
    dtype: str
    policy: str
    layer_slots: str
    codec: str
    codec_version: str
    tokens: str
    tenant: str
    session_id: str


@dataclass(frozen=True)
class Section:
    """Where the slots of one layer and KV head lie: offset from the segment's start, bytes, slots and checksum.

    So does the summary, which has no slots.
    """

    offset: int
    size: int
    slots: int
    crc: int


@dataclass(frozen=True)
class SegmentHeader:
    """The parsed header of a segment; ``sections`` runs by layer, then by head."""

    identity: SegmentIdentity
    epoch: int
    step: int
    layers: int
    kv_heads: int
    head_dim: int
    size: int
    summary: Section
    sections: tuple[Section, ...]

    def section(self, layer: int, kv_head: int) -> Section:
        """Return the section of one layer and KV head.

        Raises:
            CorruptSegmentError: There is no such section.
        """
        if not (0 <= layer < self.layers and 0 <= kv_head < self.kv_heads):
            raise CorruptSegmentError(f"no section for layer {layer}, head {kv_head}")
        return self.sections[layer * self.kv_heads + kv_head]

    @property
    def slots(self) -> int:
        """Slots in the segment, over all layers and heads."""
        return sum(section.slots for section in self.sections)


def build_segment(
    identity: SegmentIdentity,
    epoch: int,
    step: int,
    shape: tuple[int, int, int],
    sections: Sequence[tuple[int, bytes]],
    summary: bytes = b"",
) -> bytes:
    """Assemble a segment.

    Args:
        identity: Its identity.
        epoch: Epoch that the eviction began.
        step: Tokens seen at the eviction.
        shape: ``(layers, kv_heads, head_dim)``.
        sections: By layer, then by head: number of slots and the encoded bytes.
        summary: The summary of their keys; none if nobody will recall them.

    Raises:
        ValueError: The sections do not match the shape, or a text of the identity is too long to be read back.
    """
    layers, kv_heads, head_dim = shape
    if len(sections) != layers * kv_heads:
        raise ValueError(f"{len(sections)} sections do not match {layers} layers of {kv_heads} KV heads")
    body = pack_texts(asdict(identity))
    header_size = START_BYTES + len(body) + _SUMMARY.size + _COUNTS.size + len(sections) * _ENTRY.size + _CRC.size
    offset = header_size + len(summary)
    table = []
    for slots, data in sections:
        table.append(_ENTRY.pack(offset, len(data), slots, crc32(data)))
        offset += len(data)
    header = b"".join(
        [
            _START.pack(MAGIC, VERSION, header_size, offset),
            body,
            _SUMMARY.pack(len(summary), crc32(summary)),
            _COUNTS.pack(epoch, step, layers, kv_heads, head_dim),
            *table,
        ]
    )
    return b"".join([header, _CRC.pack(crc32(header)), summary, *(data for _, data in sections)])


def header_size(start: bytes) -> int:
    """Return the header's size from the first ``START_BYTES`` of a segment.

    Raises:
        CorruptSegmentError: These are not the first bytes of a segment that this version reads.
    """
    size, _ = _parse_start(start)
    return size


def parse_header(data: bytes) -> SegmentHeader:
    """Parse and check a header; ``data`` may hold more than the header.

    Raises:
        CorruptSegmentError: The bytes fail a check.
    """
    size, total = _parse_start(data)
    if len(data) < size:
        raise CorruptSegmentError(f"header is truncated: {len(data)} of {size} bytes")
    header = memoryview(data)[: size - _CRC.size]
    if _CRC.unpack_from(data, size - _CRC.size)[0] != crc32(header):
        raise CorruptSegmentError("header fails its checksum")
    try:
        return _parse_body(header, size, total)
    except (struct.error, ValueError) as error:
        raise CorruptSegmentError(f"header is malformed: {error}") from error


def check_section(section: Section, data: bytes) -> None:
    """Check the bytes of one section.

    Raises:
        CorruptSegmentError: They are not the section's.
    """
    if len(data) != section.size:
        raise CorruptSegmentError(f"section is {len(data)} bytes instead of {section.size}")
    if crc32(data) != section.crc:
        raise CorruptSegmentError("section fails its checksum")


def check_segment(data: bytes) -> SegmentHeader:
    """Check a whole segment: its header, its size, its summary and every section.

    Raises:
        CorruptSegmentError: The bytes fail a check.
    """
    header = parse_header(data)
    if len(data) != header.size:
        raise CorruptSegmentError(f"segment is {len(data)} bytes instead of {header.size}")
    view = memoryview(data)
    for section in (header.summary, *header.sections):
        check_section(section, view[section.offset : section.offset + section.size])  # type: ignore[arg-type]
    return header


def _parse_start(data: bytes) -> tuple[int, int]:
    if len(data) < START_BYTES:
        raise CorruptSegmentError(f"segment is truncated: {len(data)} bytes")
    magic, version, size, total = _START.unpack_from(data)
    if magic != MAGIC:
        raise CorruptSegmentError("not a segment: wrong magic")
    if version != VERSION:
        raise CorruptSegmentError(f"segment has version {version}; this program reads {VERSION}")
    if not START_BYTES + _SUMMARY.size + _COUNTS.size + _CRC.size <= size <= min(MAX_HEADER_BYTES, total):
        raise CorruptSegmentError(f"header size {size} is out of range")
    if total > MAX_SEGMENT_BYTES:
        raise CorruptSegmentError(f"segment size {total} is above the limit of {MAX_SEGMENT_BYTES}")
    return size, total


def _parse_body(header: memoryview, size: int, total: int) -> SegmentHeader:
    texts, at = unpack_texts(header, START_BYTES, len(fields(SegmentIdentity)))
    summary_size, summary_crc = _SUMMARY.unpack_from(header, at)
    summary = Section(size, summary_size, 0, summary_crc)
    at += _SUMMARY.size
    epoch, step, layers, kv_heads, head_dim = _COUNTS.unpack_from(header, at)
    at += _COUNTS.size
    if len(header) - at != layers * kv_heads * _ENTRY.size:
        raise CorruptSegmentError("table does not fit the header")
    sections = []
    expected = size + summary_size
    for offset, length, slots, crc in _ENTRY.iter_unpack(header[at:]):
        if offset != expected:
            raise CorruptSegmentError("sections are not contiguous")
        expected += length
        sections.append(Section(offset, length, slots, crc))
    if expected != total:
        raise CorruptSegmentError("sections do not fill the segment")
    return SegmentHeader(
        SegmentIdentity(*texts), epoch, step, layers, kv_heads, head_dim, total, summary, tuple(sections)
    )
