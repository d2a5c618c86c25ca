"""Sketches as the protocol writes them, and the checked inverse."""

from collections.abc import Iterator, Sequence

import numpy as np

from scissorhands.errors import InvalidRequestError
from scissorhands.recall import HeadSketch
from scissorhands.v1 import recall_pb2

_QUERY, _NUMBER = np.dtype("<f2"), np.dtype("<u4")


def sketch_messages(
    header: recall_pb2.RecallHeader, sketch: Sequence[HeadSketch]
) -> Iterator[recall_pb2.RecallSectionsRequest]:
    """Yield the messages of a sketch, a layer each.

    Args:
        header: What it is of.
        sketch: Of each KV head, by layer, then by head.
    """
    yield recall_pb2.RecallSectionsRequest(header=header)
    for first in range(0, len(sketch), header.kv_heads):
        heads = [
            recall_pb2.HeadSketch(
                queries=asked.queries.astype(_QUERY).tobytes(),
                resident=asked.resident.astype(_NUMBER).tobytes(),
                allowance=asked.allowance,
            )
            for asked in sketch[first : first + header.kv_heads]
        ]
        yield recall_pb2.RecallSectionsRequest(layer=recall_pb2.LayerSketch(heads=heads))


def read_layer(layer: recall_pb2.LayerSketch, header: recall_pb2.RecallHeader) -> list[HeadSketch]:
    """Read one layer of a sketch.

    Raises:
        InvalidRequestError: It is malformed.
    """
    if len(layer.heads) != header.kv_heads:
        raise InvalidRequestError("layer.heads", f"must be {header.kv_heads}, got {len(layer.heads)}")
    row = header.head_dim * _QUERY.itemsize
    found = []
    for head in layer.heads:
        if len(head.queries) % row:
            raise InvalidRequestError("layer.heads.queries", f"must be whole queries of {row} bytes")
        if len(head.resident) % _NUMBER.itemsize:
            raise InvalidRequestError("layer.heads.resident", "must be whole numbers of 4 bytes")
        queries = np.frombuffer(head.queries, _QUERY).reshape(-1, header.head_dim)
        found.append(HeadSketch(queries, np.frombuffer(head.resident, _NUMBER), head.allowance))
    return found


def slots_bytes(slots: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> bytes:
    """Write slots of a section."""
    return slots.astype(_NUMBER).tobytes()


def read_slots(data: bytes, most: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Read slots of a section that has ``most``.

    Raises:
        InvalidRequestError: They are not its slots, ascending.
    """
    if len(data) % _NUMBER.itemsize:
        raise InvalidRequestError("section.slots", "must be whole numbers of 4 bytes")
    slots = np.frombuffer(data, _NUMBER).astype(np.intp)
    if not slots.size or slots[-1] >= most or np.any(np.diff(slots) <= 0):
        raise InvalidRequestError("section.slots", f"must ascend, and be below {most}")
    return slots
