"""Evidence on its way to the host: copied once, whole, when a snapshot is taken."""

from collections.abc import Sequence

import numpy as np
import torch

from scissorhands.layer_pool import LayerPool
from scissorhands.memory import addresses_of, gather, slot_bytes, slots_of
from scissorhands.snapshot import LayerEvidence


def evidence_of(layers: Sequence[LayerPool], row: int, lengths: Sequence[int], step: int) -> tuple[LayerEvidence, ...]:
    """Copy the evidence of layers of a row to the host; a sliding layer has none, whatever it holds.

    Args:
        layers: Layers of one pool.
        row: The row.
        lengths: Of each layer its slots in use.
        step: Tokens that the row has seen.
    """
    # What is on the host and is evidence as it is kept is copied in one call.
    plain = [index for index, layer in enumerate(layers) if layer.keys.is_cpu and layer.plain]
    copied = _copies([layers[index] for index in plain], row, [lengths[index] for index in plain]) if plain else []
    found = dict(zip(plain, copied, strict=True))
    return tuple(
        found.get(index) or layer.evidence(row, length, step)
        for index, (layer, length) in enumerate(zip(layers, lengths, strict=True))
    )


def _copies(layers: Sequence[LayerPool], row: int, lengths: Sequence[int]) -> list[LayerEvidence]:
    held = [layer.of_row(row)[2:] for layer in layers]  # Positions, and the states of the signals.
    heads = len(held[0][0])
    copies = [torch.empty(heads * sum(lengths), dtype=tensor.dtype) for tensor in held[0]]
    gather(
        addresses_of(held), slot_bytes(held[0]), slots_of(held), np.array(lengths),
        np.array([copy.data_ptr() for copy in copies]), heads,
    )  # fmt: skip
    names = [signal.name for signal in layers[0].signals]
    arrays, end, found = [copy.numpy() for copy in copies], 0, []
    for length in lengths:
        start, end = end, end + heads * length
        positions, *states = (array[start:end].reshape(heads, length) for array in arrays)
        found.append(LayerEvidence(positions, dict(zip(names, states, strict=True))))
    return found
