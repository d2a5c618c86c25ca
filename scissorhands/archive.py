"""Archiving: evicted slots become a segment, and a section of one becomes slots again."""

from collections.abc import Sequence

import numpy as np
import torch

from scissorhands.codec import Codec
from scissorhands.errors import CorruptSegmentError
from scissorhands.segment import SegmentIdentity, build_segment
from scissorhands.slots import Slots

_POSITION = np.dtype("<u4")


def encode_segment(
    identity: SegmentIdentity,
    epoch: int,
    step: int,
    layers: Sequence[Slots],
    codec: Codec,
    kv_heads: int | None = None,
) -> bytes:
    """Encode what one plan evicted.

    Args:
        identity: The segment's identity.
        epoch: Epoch that the eviction began.
        step: Tokens seen at the eviction.
        layers: The evicted slots of each layer of a row's pool; of a sliding one none.
        codec: The codec; its name and version must be the identity's.
        kv_heads: KV heads of a layer of the model; default: those of a layer of the pool. The segment has the model's
            layers and heads, also if a row's budgets are by head and its pool has a layer for each of them.

    Raises:
        InvalidRequestError: A key or value is not finite.
    """
    sections = []
    for slots in layers:
        positions = slots.positions.cpu().numpy().astype(_POSITION)
        keys = codec.encode(slots.keys).cpu().numpy()
        values = codec.encode(slots.values).cpu().numpy()
        for head in range(len(positions)):
            data = positions[head].tobytes() + keys[head].tobytes() + values[head].tobytes()
            sections.append((positions.shape[1], data))
    heads, _, head_dim = layers[0].keys.shape
    heads = kv_heads or heads
    shape = (len(sections) // heads, heads, head_dim)
    return build_segment(identity, epoch, step, shape, sections)


def decode_section(
    data: bytes, slots: int, codec: Codec, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode one section, whose checksum has been checked.

    Args:
        data: The section's bytes.
        slots: Number of slots in it, from the segment's table.
        codec: The codec of the segment's identity.
        head_dim: Elements of one key or value.
        dtype: Number type to decode into.

    Returns:
        Positions ``[slots]`` int64, keys and values ``[slots, head_dim]``.

    Raises:
        CorruptSegmentError: The section has the wrong size for its slots.
    """
    row_bytes = codec.row_bytes(head_dim, dtype)
    wanted = slots * (_POSITION.itemsize + 2 * row_bytes)
    if len(data) != wanted:
        raise CorruptSegmentError(f"section of {slots} slots is {len(data)} bytes instead of {wanted}")
    positions = np.frombuffer(data, dtype=_POSITION, count=slots).astype(np.int64)
    rows = np.frombuffer(data, dtype=np.uint8, offset=slots * _POSITION.itemsize).reshape(2, slots, row_bytes)
    vectors = codec.decode(torch.tensor(rows), head_dim, dtype)
    return torch.from_numpy(positions), vectors[0], vectors[1]
