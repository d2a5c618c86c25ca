"""Vectors to encode, and small statistics of no model for the codecs that need some."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from support import format_reference as reference

from scissorhands.codec import Codec, Statistics, get_codec
from scissorhands.formats import parse

# All formats, with all bits of each.
PLAIN = ["none", "int8", "int4", "int4-hadamard", "turboquant:2", "turboquant:3", "turboquant:4", "turboquant:k4v3"]
BY_BLOCK = ["kivi:2", "kivi:4", "kivi:k4v2"]
CALIBRATED = [
    *(f"block-gtq:{bits}" for bits in (2, 3, 4)),
    *(f"klt:{bits}" for bits in (2, 2.5, 3, 3.5, 4, 4.5, 5, 6)),
]
ROTATED = ["int4-hadamard", "turboquant:2", "turboquant:3", "turboquant:4", *CALIBRATED]
ALL = [*PLAIN, *BY_BLOCK, *CALIBRATED]
SIZES = [64, 80, 96, 128, 256]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["normal", "outliers", "outlier_channel", "constant", "one_sided", "zeros", "two_scales"]
HEADS = 3


def vectors(shape: tuple[int, ...], kind: str, magnitude: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random vectors of a kind, none beyond what float16 holds."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator)
    if kind == "outliers":
        made *= torch.where(torch.rand(shape, generator=generator) < 0.02, 100.0, 1.0)
    elif kind == "outlier_channel":
        made[..., shape[-1] // 3] = made[..., shape[-1] // 3].abs() * 30 + 300
    elif kind == "constant":
        made = torch.ones(shape) * made[..., :1]
    elif kind == "one_sided":
        made = made.abs() + 3
    elif kind == "zeros":
        made.zero_()
    elif kind == "two_scales":
        made[..., ::2] *= 1e-4
    return (made * magnitude).clamp(-65000, 65000).to(dtype)


@lru_cache
def statistics_tensors(head_dim: int, heads: int = HEADS, *, rotary: bool = True) -> dict[str, torch.Tensor]:
    """Return statistics of random moments whose eigenvalues fall over three decades."""
    generator = torch.Generator().manual_seed(head_dim)
    tensors = {}
    for side in ("keys", "values"):
        metric, directions = (_orthogonal(heads, head_dim, generator) for _ in range(2))
        roots = torch.logspace(0, -1, head_dim, dtype=torch.float64)
        root = (metric * roots) @ metric.mT
        spectrum = torch.logspace(0, -3, head_dim, dtype=torch.float64)
        jitter = torch.rand(heads, head_dim, generator=generator, dtype=torch.float64) / 2 + 0.5
        tensors[f"{side}.analysis"] = (directions.mT @ root).half().contiguous()
        tensors[f"{side}.spectrum"] = (spectrum * jitter).sort(descending=True).values.float()
    if rotary:
        pairs = torch.rand(heads, head_dim // 2, generator=generator)
        tensors["rotary.energy"] = (pairs * 8).exp()
    return tensors


@lru_cache
def statistics(head_dim: int, heads: int = HEADS, *, rotary: bool = True) -> Statistics:
    """Return them as the program holds them."""
    return Statistics(statistics_tensors(head_dim, heads, rotary=rotary), {"model": "none"})


@lru_cache
def codec_of(name: str, head_dim: int) -> Codec:
    """Return a codec for vectors of ``HEADS`` KV heads."""
    return get_codec(name, head_dim, statistics(head_dim) if parse(name).calibrated else None)


@lru_cache
def basis_of(name: str, side: str, head: int, head_dim: int) -> reference.Basis:
    """Return the basis in which a rotated format stores the keys or values of a KV head."""
    found = parse(name)
    bits = found.key_bits if side == "keys" else found.value_bits
    tensors = {key: tensor.double().numpy() for key, tensor in statistics_tensors(head_dim).items()}
    if found.family == "klt":
        return reference.transformed(tensors, side, head, bits)
    if found.family == "block-gtq" and side == "keys":
        return reference.by_energy(tensors, head, int(bits))
    return reference.rotated(head_dim, int(bits), even=found.family == "int4-hadamard")


def decode_by_hand(
    name: str, side: str, head: int, data: npt.NDArray[np.uint8], shape: tuple[int, int], dtype: torch.dtype
) -> npt.NDArray[np.float64]:
    """Decode ``shape[0]`` keys or values of a KV head, of ``shape[1]`` elements, with the reference decoder."""
    found = parse(name)
    count, head_dim = shape
    bits = int(found.key_bits if side == "keys" else found.value_bits)
    if found.family == "kivi" and side == "keys":
        return reference.by_channel(data, count, head_dim, bits)
    rows = data.reshape(count, -1)
    if found.family == "none":
        return np.stack([reference.plain(row, str(dtype).removeprefix("torch.")) for row in rows])
    if found.family in {"int4", "int8", "kivi"}:
        return np.stack([reference.grouped(row, head_dim, bits) for row in rows])
    return np.stack([basis_of(name, side, head, head_dim).decode(row) for row in rows])


def _orthogonal(heads: int, size: int, generator: torch.Generator) -> torch.Tensor:
    made, _ = torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64))
    return made
