"""What one run through the cache remembered, and when each slot was dropped."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scissorhands.budget import HALF_BYTES, Grant, ModelShape


@dataclass(frozen=True)
class Cut:
    """One eviction.

    Args:
        step: Tokens seen at the eviction.
        phase: ``prefill`` or ``decode``.
        slots: Evicted slots over all layers and heads.
        mass: Attention mass on them, summed over layers and heads, in queries.
    """

    step: int
    phase: str
    slots: int
    mass: float


@dataclass(frozen=True)
class Recording:
    """One run. The last token was chosen but never appended, so it has no slots.

    Args:
        ids: Token ids of prompt and answer.
        prompt: How many of them are the prompt.
        grant: The budget and the policy's numbers.
        shape: The model's sizes.
        allocated_bytes: Of the row, measured on its tensors.
        cuts: The evictions, in order.
        dropped_at: ``[global layers, kv_heads, len(ids) - 1]`` int32: number of the eviction, from 1, that dropped a
            token's slot; 0 if it is still held. Sliding layers do not evict: their windows move by themselves.
        mass: The same shape, float32: attention that the slot received while it was held, in queries.
    """

    ids: tuple[int, ...]
    prompt: int
    grant: Grant
    shape: ModelShape
    allocated_bytes: int
    cuts: tuple[Cut, ...]
    dropped_at: npt.NDArray[np.int32]
    mass: npt.NDArray[np.float32]

    @property
    def appended(self) -> int:
        """Tokens that went through the cache."""
        return len(self.ids) - 1

    @property
    def full_bytes(self) -> int:
        """Bytes of a full cache in 16 bits."""
        return self.shape.full_bytes(len(self.ids), HALF_BYTES)

    @property
    def own_full_bytes(self) -> int:
        """Bytes of a full cache in the model's own number type."""
        return self.shape.full_bytes(len(self.ids))

    @property
    def mass_dropped(self) -> float:
        """Share of all attention that lay on slots that were evicted later."""
        lanes = len(self.shape.global_layers) * self.shape.kv_heads
        return sum(cut.mass for cut in self.cuts) / (self.appended * lanes)
