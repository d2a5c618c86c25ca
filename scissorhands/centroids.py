"""Centroids of keys, for summaries: k-means in every block of a segment at once, on the device."""

from collections.abc import Sequence

import torch

from scissorhands.summary import BLOCK_SLOTS, CENTROIDS

# Blocks are small: assignments hardly change after a few rounds.
_ROUNDS = 6


def centroids_of(keys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the centroids of every block of every section.

    Args:
        keys: Of each section, ``[slots, head_dim]``, exact and finite.

    Returns:
        ``[blocks, 4, head_dim]`` float32 centroids, and ``[blocks, 4]`` int64, keys that each stands for.
    """
    blocks = [block for own in keys if len(own) for block in torch.split(own.float(), BLOCK_SLOTS)]
    if not blocks:
        head_dim = keys[0].shape[1]
        return torch.zeros(0, CENTROIDS, head_dim), torch.zeros(0, CENTROIDS, dtype=torch.long)
    padded = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    sizes = torch.tensor([len(block) for block in blocks], device=padded.device).unsqueeze(1)
    valid = (torch.arange(padded.shape[1], device=padded.device) < sizes).unsqueeze(2)
    # Spread over the block: neighbors tend to be alike.
    first = torch.arange(CENTROIDS, device=padded.device) * (sizes - 1) // (CENTROIDS - 1)
    centroids = padded.gather(1, first.unsqueeze(2).expand(-1, -1, padded.shape[2]))
    member = torch.zeros(0)
    for _ in range(_ROUNDS):
        distances = (centroids * centroids).sum(dim=2).unsqueeze(1) - 2 * padded @ centroids.mT
        nearest = distances.argmin(dim=2, keepdim=True)
        member = (nearest == torch.arange(CENTROIDS, device=padded.device)) & valid
        counts = member.sum(dim=1)
        means = member.mT.to(padded) @ padded / counts.clamp(min=1).unsqueeze(2)
        centroids = torch.where(counts.unsqueeze(2) > 0, means, centroids)
    return centroids, member.sum(dim=1)
