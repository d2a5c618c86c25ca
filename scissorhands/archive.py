"""Archiving: evicted slots become a segment, and a section of one becomes slots again."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from scissorhands.centroids import centroids_of
from scissorhands.codec import Codec
from scissorhands.codec.base import require_finite
from scissorhands.errors import CorruptSegmentError
from scissorhands.segment import SegmentIdentity, build_segment
from scissorhands.slots import LooseSlots, Slots
from scissorhands.summary import pack_summary

_POSITION = np.dtype("<u4")


def encode_segment(
    identity: SegmentIdentity,
    epoch: int,
    step: int,
    layers: Sequence[Slots],
    codec: Codec,
    head_dim: int,
    kv_heads: int | None = None,
    exact_keys: Sequence[torch.Tensor] | None = None,
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
        exact_keys: Of each layer, the keys as the model knows them, ``[kv_heads, d, head_dim]``: a summary of them goes
            with the segment, so that its slots can be recalled. None makes no summary.

    Raises:
        InvalidRequestError: A key or value is not finite.
    """
    sections = []
    summary = b"" if exact_keys is None else _summary(layers, exact_keys)
    exact = [index for index, slots in enumerate(layers) if not slots.packed]
    encoded_keys = dict(zip(exact, codec.keys.encode_each([layers[index].keys for index in exact]), strict=True))
    encoded_values = dict(zip(exact, codec.values.encode_each([layers[index].values for index in exact]), strict=True))
    for index, slots in enumerate(layers):
        positions = slots.positions.cpu().numpy().astype(_POSITION)
        keys = encoded_keys.get(index, slots.keys).cpu().numpy()
        values = encoded_values.get(index, slots.values).cpu().numpy()
        for head in range(len(positions)):
            data = positions[head].tobytes() + keys[head].tobytes() + values[head].tobytes()
            sections.append((positions.shape[1], data))
    heads = kv_heads or len(layers[0].positions)
    shape = (len(sections) // heads, heads, head_dim)
    return build_segment(identity, epoch, step, shape, sections, summary)


def _summary(layers: Sequence[Slots], keys: Sequence[torch.Tensor]) -> bytes:
    """Summarize the keys of all sections."""
    positions = [own for slots in layers for own in slots.positions.cpu().numpy()]
    centroids, counts = centroids_of([own for layer in keys for own in layer])
    require_finite(centroids)
    return pack_summary(positions, centroids.cpu().numpy(), counts.cpu().numpy())


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


def decode_slots(
    data: bytes, slots: int, wanted: npt.NDArray[np.intp], codec: Codec, head_dim: int, dtype: torch.dtype
) -> LooseSlots:
    """Decode some slots of a section; see :func:`decode_section`.

    Args:
        data: The section's bytes.
        slots: Number of slots in it.
        wanted: Which of them.
        codec: The codec of the segment's identity.
        head_dim: Elements of one key or value.
        dtype: Number type to decode into.
    """
    positions, keys, values = decode_section(data, slots, codec, head_dim, dtype)
    return LooseSlots(positions[wanted].int(), keys[wanted], values[wanted])


def packed_slots(data: bytes, slots: int, wanted: npt.NDArray[np.intp], row_bytes: tuple[int, int]) -> LooseSlots:
    """Return some slots of a section that holds them as they were resident packed: not a bit changes.

    Args:
        data: The section's bytes, whose checksum has been checked.
        slots: Number of slots in it.
        wanted: Which of them.
        row_bytes: Bytes of a packed key, and of a packed value.

    Raises:
        CorruptSegmentError: The section has the wrong size for its slots.
    """
    each = _POSITION.itemsize + sum(row_bytes)
    if len(data) != slots * each:
        raise CorruptSegmentError(f"section of {slots} slots is {len(data)} bytes instead of {slots * each}")
    raw = np.frombuffer(data, dtype=np.uint8)
    positions, keys, values = np.split(raw, [slots * _POSITION.itemsize, slots * (_POSITION.itemsize + row_bytes[0])])
    return LooseSlots(
        torch.from_numpy(positions.view(_POSITION)[wanted].astype(np.int32)),
        torch.from_numpy(keys.reshape(slots, -1)[wanted]),
        torch.from_numpy(values.reshape(slots, -1)[wanted]),
    )
