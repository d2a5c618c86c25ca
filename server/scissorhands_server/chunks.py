"""Large values as messages: what is sent at once between workers and managers."""

from collections.abc import Iterator
from typing import TypeVar

# The most of one message, by the protocol.
MAX_CHUNK_BYTES = 1 << 20
# What is sent at once of rows. grpc moves messages of this size fastest: larger ones are mapped and unmapped one by
# one.
ROW_CHUNK_BYTES = 1 << 18

Bytes = TypeVar("Bytes", bytes, memoryview)


def chunks(data: Bytes, size: int = ROW_CHUNK_BYTES) -> Iterator[Bytes]:
    """Yield a value in pieces of at most ``size`` bytes."""
    return (data[start : start + size] for start in range(0, len(data), size))
