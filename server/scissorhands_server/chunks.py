"""Large values as messages: what is sent at once between workers and managers."""

from collections.abc import Iterator
from typing import TypeVar

# The most of one message, by the protocol.
MAX_CHUNK_BYTES = 1 << 20
# What is sent at once of rows: each message takes some turns of both sides' event loops, however small it is, and
# larger ones than this gain no more.
ROW_CHUNK_BYTES = 1 << 19

Bytes = TypeVar("Bytes", bytes, memoryview)


def chunks(data: Bytes, size: int = ROW_CHUNK_BYTES) -> Iterator[Bytes]:
    """Yield a value in pieces of at most ``size`` bytes."""
    return (data[start : start + size] for start in range(0, len(data), size))
