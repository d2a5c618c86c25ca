"""How much a key is like the others, the evidence of R-KV (arXiv 2505.24133, section 3.3) beside attention."""

import torch

from scissorhands.signals.base import Observation, Resident, Signal

# Above this cosine, keys count as similar (T); the latest similar token is spared (beta = 1). As the authors' code has
# them.
SIMILAR = 0.5
# Keys that others are compared with at once, from the latest back.
_BLOCK = 128


class Redundancy(Signal):
    """Mean cosine similarity of a slot's key to the keys of all slots, worked out when a snapshot is taken.

    ``S[i, j]`` is the cosine of the keys of slots i and j, 0 for ``i = j``. For each i, the similarity to the latest j
    with ``S[i, j] > T`` is set to 0, so that of tokens that are alike the latest looks the least redundant. The signal
    of j is the mean over i of what is left.

    Equation 6 of the paper names the same letter twice; which of the two is averaged over is as in the authors' code.
    That code also spares the first slot whenever a token has no similar one, which the paper does not; nor does this.
    Takes no bytes of a slot. The sum over i is one product of j's key with the sum of all keys. What remains is to find
    the latest similar slot, from the back: most keys have one near, and only those without any are compared with all.
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
        total: torch.Tensor = torch.linalg.vecdot(keys, keys.sum(dim=1, keepdim=True) - keys)
        for own, sums in zip(keys, total, strict=True):
            _spare_latest(own, sums)
        return total / slots


def _spare_latest(keys: torch.Tensor, sums: torch.Tensor) -> None:
    """Take from ``sums`` ``[n]`` each of a head's ``keys``' ``[n, head_dim]`` similarity to the latest similar one."""
    searching = torch.arange(len(keys), device=keys.device)
    # Places in a block count from 1, so that 0 stands for no similar slot.
    order = torch.arange(1, _BLOCK + 1, dtype=keys.dtype, device=keys.device)
    for end in range(len(keys), 0, -_BLOCK):
        start = max(0, end - _BLOCK)
        similarity = keys[searching] @ keys[start:end].T
        own = ((searching >= start) & (searching < end)).nonzero().squeeze(1)
        similarity[own, searching[own] - start] = 0
        latest = ((similarity > SIMILAR) * order[: end - start]).amax(dim=1).long() - 1
        found = (latest >= 0).nonzero().squeeze(1)
        sums.index_add_(0, start + latest[found], similarity[found, latest[found]], alpha=-1)
        searching = searching[latest < 0]
        if not len(searching):
            return
