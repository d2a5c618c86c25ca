"""What fewer bits cost in each KV head: keys or values of a recorded sequence decoded from a codec, all else exact."""

from collections.abc import Callable

import numpy as np
import torch

from scissorhands.budget import ModelShape
from scissorhands.calibration.fisher import Recording, full_attention
from scissorhands.calibration.replay import Losses, expected
from scissorhands.codec import Statistics, VectorCodec
from scissorhands.profile import KEY_BITS, VALUE_BITS


def bit_losses(
    recording: Recording,
    shape: ModelShape,
    statistics: Statistics,
    device: torch.device,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[Losses, Losses]:
    """Measure what the codec ``klt`` costs at each number of bits.

    Args:
        recording: A sequence in N global layers.
        shape: The sizes of one layer (:func:`scissorhands.calibration.replay.one_layer`).
        statistics: What the codec is fitted to.
        device: Where to compute.
        progress: Told how many more layers are done.

    Returns:
        ``[N, kv_heads, bits]`` of keys for :data:`~scissorhands.profile.KEY_BITS` and of values for
        :data:`~scissorhands.profile.VALUE_BITS`, nats per token.
    """
    of_keys, of_values = [], []
    for layer in range(len(recording.queries)):
        own = slice(layer, layer + 1)
        queries, keys, values = (
            part[own].to(device, torch.float32) for part in (recording.queries, recording.keys, recording.values)
        )
        gradients = recording.gradients[:, own].to(device, torch.float32)
        full = full_attention(queries, keys, values)
        heads = slice(layer * shape.kv_heads, (layer + 1) * shape.kv_heads)
        other_keys = [_stored(keys, statistics.codec("keys", bits, heads)) for bits in KEY_BITS]
        other_values = [_stored(values, statistics.codec("values", bits, heads)) for bits in VALUE_BITS]
        changed = [full_attention(queries, other, values) for other in other_keys]
        changed += [full_attention(queries, keys, other) for other in other_values]
        costs = torch.stack([expected(gradients, outputs.sub_(full), shape)[0] for outputs in changed], dim=-1)
        of_keys.append(costs[:, : len(KEY_BITS)])
        of_values.append(costs[:, len(KEY_BITS) :])
        progress(1)
    found = [torch.stack(side).double().cpu().numpy() for side in (of_keys, of_values)]
    # Estimates have noise; more bits never make it worse.
    return np.minimum.accumulate(found[0], axis=-1), np.minimum.accumulate(found[1], axis=-1)


def _stored(vectors: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Return vectors as they come back from a codec."""
    return codec.decode(codec.encode(vectors), vectors.shape[2], vectors.shape[3], vectors.dtype)
