"""Group-wise asymmetric 4-bit quantization, as in FlexGen (Sheng et al., ICML 2023, arXiv 2303.06865, section 4)."""

import math

import torch

from scissorhands.codec.base import Codec, require_finite
from scissorhands.errors import InvalidRequestError

GROUP = 64
LEVELS = 15
# Scales and minima are stored in 16 bits.
LARGEST = torch.finfo(torch.float16).max


class Int4(Codec):
    """Each group of up to 64 elements is stored as its minimum, its step, and 4 bits an element.

    A vector is laid out as the minima (float16), the steps (float16), then the elements, two to a byte, the even one
    in the low half. With ``head_dim`` 64 that is 36 bytes, 4.5 bits an element. An element is off by at most half a
    step, ``(max - min) / 30``, plus the rounding of minimum and step to float16: 2^-11 of each (at least 3e-8), the
    step's up to fifteen times over. Magnitudes above 65,504 saturate.
    """

    name = "int4"
    version = 1

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return half a byte an element and four bytes a group."""
        del dtype
        return head_dim // 2 + 4 * (head_dim // _group(head_dim))

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Quantize each group between its smallest and its largest element."""
        require_finite(vectors)
        head_dim = vectors.shape[-1]
        group = _group(head_dim)
        grouped = (*vectors.shape[:-1], head_dim // group, group)
        groups = vectors.float().clamp(-LARGEST, LARGEST).reshape(grouped)
        # Quantize against the stored, rounded minimum and step, so that decoding inverts exactly what was stored.
        low = groups.amin(dim=-1).half()
        spread = groups.amax(dim=-1) - low.float()
        step = (spread / LEVELS).clamp(0, LARGEST).half()
        divisor = torch.where(step > 0, step.float(), torch.ones_like(spread)).unsqueeze(-1)
        levels = ((groups - low.float().unsqueeze(-1)) / divisor).round().clamp(0, LEVELS).to(torch.uint8).flatten(-2)
        packed = levels[..., 0::2] | (levels[..., 1::2] << 4)
        return torch.cat([low.view(torch.uint8), step.view(torch.uint8), packed], dim=-1)

    def decode(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return minimum plus step times level."""
        group = _group(head_dim)
        groups = head_dim // group
        # contiguous() would not copy a single row, whose stride may be odd and cannot be viewed as two-byte numbers.
        scales = data[..., : 4 * groups].clone(memory_format=torch.contiguous_format).view(torch.float16).float()
        low, step = scales[..., :groups].unsqueeze(-1), scales[..., groups:].unsqueeze(-1)
        packed = data[..., 4 * groups :]
        levels = torch.stack([packed & LEVELS, packed >> 4], dim=-1).reshape(*low.shape[:-1], group)
        # A minimum and fifteen rounded steps can exceed float16 by a hair where the input did not.
        limit = min(LARGEST, torch.finfo(dtype).max)
        vectors: torch.Tensor = (low + step * levels.float()).clamp(-limit, limit).flatten(-2).to(dtype)
        return vectors


def _group(head_dim: int) -> int:
    """Return the largest group of at most 64 elements that divides ``head_dim``."""
    if head_dim % 2:
        raise InvalidRequestError(
            "head_dim", f"int4 packs two elements to a byte and needs an even size, got {head_dim}"
        )
    return math.gcd(head_dim, GROUP)
