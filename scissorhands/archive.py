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
    head_dim: int,
    kv_heads: int | None = None,
) -> bytes:
    """Encode what one plan evicted.

    Args:
        identity: The segment's identity.
        epoch: Epoch that the eviction began.
        step: Tokens seen at the eviction.
        layers: The evicted slots of each layer of a row's pool; of a sliding one none.
        codec: The codec; its name and version must be the identity's. Slots that were resident packed are stored as
            they were.
        head_dim: Elements of a key.
        kv_heads: KV heads of a layer of the model; default: those of a layer of the pool. The segment has the model's
            layers and heads, also if a row's budgets are by head and its pool has a layer for each of them.

    Raises:
        InvalidRequestError: A key or value is not finite.
    """
    sections = []
    for slots in layers:
        positions = slots.positions.cpu().numpy().astype(_POSITION)
        if slots.packed:
            keys, values = slots.keys.cpu().numpy(), slots.values.cpu().numpy()
        else:
            keys, values = codec.keys.encode(slots.keys).cpu().numpy(), codec.values.encode(slots.values).cpu().numpy()
        for head in range(len(positions)):
            data = positions[head].tobytes() + keys[head].tobytes() + values[head].tobytes()
            sections.append((positions.shape[1], data))
    heads = kv_heads or len(layers[0].positions)
    shape = (len(sections) // heads, heads, head_dim)
    return build_segment(identity, epoch, step, shape, sections)


def decode_section(
    data: bytes, slots: int, codec: Codec, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode one section, whose checksum has been checked.

    Args:
        data: The section's bytes.
        slots: Number of slots in it, from the segment's table.
        codec: The codec of the segment's identity; of a calibrated one the section's head
            (:meth:`scissorhands.codec.Codec.of_head`), made for the heads that were encoded together.
        head_dim: Elements of one key or value.
        dtype: Number type to decode into.

    Returns:
        Positions ``[slots]`` int64, keys and values ``[slots, head_dim]``.

    Raises:
        CorruptSegmentError: The section has the wrong size for its slots.
    """
    key_bytes, value_bytes = (side.block_bytes(slots, head_dim, dtype) for side in (codec.keys, codec.values))
    wanted = slots * _POSITION.itemsize + key_bytes + value_bytes
    if len(data) != wanted:
        raise CorruptSegmentError(f"section of {slots} slots is {len(data)} bytes instead of {wanted}")
    positions = np.frombuffer(data, dtype=_POSITION, count=slots).astype(np.int64)
    blocks = torch.tensor(np.frombuffer(data, dtype=np.uint8, offset=slots * _POSITION.itemsize))
    keys, values = torch.split(blocks, [key_bytes, value_bytes])
    return (
        torch.from_numpy(positions),
        codec.keys.decode(keys, slots, head_dim, dtype),
        codec.values.decode(values, slots, head_dim, dtype),
    )
