"""Triton kernels for one new token a row, where there is a GPU. Without one, or without triton, torch does all."""

from collections.abc import Hashable
from importlib.util import find_spec

import torch

from scissorhands.layer_pool import LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.span import Span

# Triton takes a while to import, and a processor has no use for it.
_AVAILABLE = torch.cuda.is_available() and find_spec("triton") is not None
if _AVAILABLE:
    from scissorhands.kernels import launch
    from scissorhands.kernels.launch import Places as Places


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


def capturable(device: torch.device) -> bool:
    """Return whether decode steps on a device can be captured, as far as the device goes."""
    return _AVAILABLE and device.type == "cuda"


def kind_of(pool: LayerPool, group: int) -> Hashable | None:
    """Return what the kernels of a layer are compiled for with ``group`` query heads to a KV head.

    Layers of equal kinds and equal formats can be one batch. None where the kernels do not fit.
    """
    return launch.kernel_of(pool) if launch.fits(pool, group) else None


def places(table: torch.Tensor, slots: torch.Tensor, steps: torch.Tensor, capacity: int) -> "Places":
    """Return :class:`~scissorhands.kernels.launch.Places`."""
    return launch.Places(table, slots, steps, capacity)


def attend_at(pool: LayerPool, where: "Places", new: NewTokens) -> torch.Tensor:
    """Do for rows anywhere what :func:`attend` does, on the current device, evidence included."""
    return launch.attend_at(pool, where, new, observe=True)
