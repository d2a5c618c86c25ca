"""How much a key is like the others, the evidence of R-KV (arXiv 2505.24133, section 3.3) beside attention."""

import torch

from scissorhands.signals.base import Observation, Resident, Signal

# Above this cosine, keys count as similar (T); the latest similar token is spared (beta = 1). As the authors' code has
# them.
SIMILAR = 0.5
# Keys that are compared with all others at once; it bounds the memory of the n x n similarities.
_BLOCK = 256


class Redundancy(Signal):
    """Mean cosine similarity of a slot's key to the keys of all slots, worked out when a snapshot is taken.

    ``S[i, j]`` is the cosine of the keys of slots i and j, 0 for ``i = j``. For each i, the similarity to the latest j
    with ``S[i, j] > T`` is set to 0, so that of tokens that are alike the latest looks the least redundant. The signal
    of j is the mean over i of what is left.

    Equation 6 of the paper names the same letter twice; which of the two is averaged over is as in the authors' code.
    That code also spares the first slot whenever a token has no similar one, which the paper does not; nor does this.
    Takes no bytes of a slot, and for n slots n² products of keys a snapshot.
    """

    name = "redundancy"

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots, 0]``: no state."""
        return torch.zeros(rows, kv_heads, slots, 0, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Learn nothing from attention."""

    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the mean similarities, float32."""
        del state
        keys = torch.nn.functional.normalize(resident.keys.float(), dim=-1, eps=1e-8)
        slots = keys.shape[1]
        # Slots count from 1 here, so that 0 stands for no similar slot.
        order = torch.arange(1, slots + 1, dtype=torch.float32, device=keys.device)
        total = keys.new_zeros(keys.shape[:2])
        for start in range(0, slots, _BLOCK):
            block = slice(start, min(start + _BLOCK, slots))
            similarity = keys[:, block] @ keys.transpose(1, 2)
            similarity.diagonal(offset=start, dim1=1, dim2=2).zero_()
            latest = ((similarity > SIMILAR) * order).amax(dim=2).long()
            spared = similarity.gather(2, (latest - 1).clamp_min(0).unsqueeze(2)).squeeze(2)
            total += similarity.sum(dim=1)
            total.scatter_add_(1, (latest - 1).clamp_min(0), -spared * (latest > 0))
        return total / slots
