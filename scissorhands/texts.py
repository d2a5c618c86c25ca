"""Short texts in binary headers: each with its length before it, and none longer than it may be read back."""

import struct
from collections.abc import Mapping

MAX_TEXT_BYTES = 4096

_LENGTH = struct.Struct("<H")


def pack_texts(texts: Mapping[str, str]) -> bytes:
    """Write the values of ``texts``, UTF-8, in their order.

    Raises:
        ValueError: One is above :data:`MAX_TEXT_BYTES`; the message has its name.
    """
    packed = []
    for name, text in texts.items():
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"{name} is {len(data)} bytes, above the limit of {MAX_TEXT_BYTES}")
        packed.append(_LENGTH.pack(len(data)) + data)
    return b"".join(packed)


def unpack_texts(data: memoryview, at: int, count: int) -> tuple[list[str], int]:
    """Read ``count`` texts from ``at``; return them and where they end.

    Raises:
        ValueError: One is too long, truncated or no UTF-8.
        struct.error: The data end before them.
    """
    texts = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, at)
        if length > MAX_TEXT_BYTES:
            raise ValueError(f"identity text of {length} bytes is above the limit of {MAX_TEXT_BYTES}")
        at += _LENGTH.size
        text = bytes(data[at : at + length])
        if len(text) != length:
            raise ValueError("identity is truncated")
        texts.append(text.decode())
        at += length
    return texts, at
