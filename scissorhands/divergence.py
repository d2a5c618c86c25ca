"""How far next-token distributions are from those of a full cache."""

import torch


def divergence(logits: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare next-token distributions.

    Args:
        logits: ``[tokens, vocabulary]``.
        reference: ``[tokens, vocabulary]``, those of the full cache.

    Returns:
        ``[tokens]`` float64, the Kullback-Leibler divergence of ``logits`` from ``reference`` (the mean under the
        reference of the logarithm of how much more likely it finds a token) in nats, never negative; and ``[tokens]``
        bool, whether both have the same most likely token.
    """
    expected = torch.log_softmax(reference.double(), dim=-1)
    found = torch.log_softmax(logits.double(), dim=-1)
    likely = expected.exp()
    # What the reference finds impossible does not count, even if both do and the logarithms have no difference.
    nats = torch.where(likely > 0, likely * (expected - found), 0.0).sum(dim=-1)
    return nats.clamp(min=0.0), logits.argmax(dim=-1) == reference.argmax(dim=-1)
