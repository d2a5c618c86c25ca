"""Triton kernels for one new token a row, where there is a GPU. Without one, or without triton, torch does all."""

from importlib.util import find_spec

import torch

from scissorhands.layer_pool import LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.span import Span

# Triton takes a while to import, and a processor has no use for it.
_AVAILABLE = torch.cuda.is_available() and find_spec("triton") is not None
if _AVAILABLE:
    from scissorhands.kernels import launch


def fits(pool: LayerPool, new: NewTokens) -> bool:
    """Return whether the kernels can attend to a layer's slots for new tokens."""
    return (
        _AVAILABLE
        and new.query.is_cuda
        and new.query.shape[2] == 1
        and launch.fits(pool, new.query.shape[1] // new.keys.shape[1])
    )


def attend(pool: LayerPool, span: Span, new: NewTokens, *, observe: bool) -> torch.Tensor:
    """Do what :func:`scissorhands.attention.attend` does, for new tokens that fit."""
    return launch.attend(pool, span, new, observe=observe)
