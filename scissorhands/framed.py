"""Framed manifests: magic, version and size before a body, and a checksum of all that behind it.

All numbers are little-endian::

    magic, 4 bytes | version u16 | bytes u32, of all of it
    body
    crc u32                                                                  of all before it
"""

import struct
from collections.abc import Callable
from typing import TypeVar

from isal.isal_zlib import crc32

from scissorhands.errors import CorruptRowError

MAX_MANIFEST_BYTES = 1 << 20

_START = struct.Struct("<4sHI")
_CRC = struct.Struct("<I")

Read = TypeVar("Read")


def frame(magic: bytes, version: int, body: bytes) -> bytes:
    """Frame the body of a manifest.

    Raises:
        ValueError: It is above :data:`MAX_MANIFEST_BYTES`.
    """
    size = _START.size + len(body) + _CRC.size
    if size > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {size} bytes is above the limit of {MAX_MANIFEST_BYTES}")
    checked = _START.pack(magic, version, size) + body
    return checked + _CRC.pack(crc32(checked))


def read_frame(data: bytes, magic: bytes, version: int, read: Callable[[memoryview], Read]) -> Read:
    """Check a framed manifest, and return what ``read`` makes of its body.

    Args:
        data: The manifest.
        magic: What it must begin with.
        version: What version it must be of.
        read: Reads the body; may raise ``struct.error`` and ``ValueError``.

    Raises:
        CorruptRowError: The bytes fail a check, are of another version, or cannot be read.
    """
    if not _START.size + _CRC.size <= len(data) <= MAX_MANIFEST_BYTES:
        raise CorruptRowError(f"a manifest cannot be {len(data)} bytes")
    found_magic, found_version, size = _START.unpack_from(data)
    if found_magic != magic or found_version != version:
        raise CorruptRowError(f"not a manifest of version {version}")
    checked = memoryview(data)[: -_CRC.size]
    if size != len(data) or _CRC.unpack_from(data, len(checked))[0] != crc32(checked):
        raise CorruptRowError("the manifest fails its checksum")
    try:
        return read(checked[_START.size :])
    except (struct.error, ValueError) as error:
        raise CorruptRowError(f"the manifest is malformed: {error}") from error
