"""Group-wise asymmetric quantization, as in FlexGen (Sheng et al., ICML 2023, arXiv 2303.06865, section 4)."""

import math

import torch

from scissorhands.codec.base import Layout, RowCodec, Unpacked
from scissorhands.codec.packing import packed_bytes, packing_of
from scissorhands.formats import GROUP, RANGE_BYTES

# Minima and steps are stored in 16 bits.
LARGEST = torch.finfo(torch.float16).max
# Bits of a level that takes a whole byte.
_WHOLE = 8


class Grouped(RowCodec):
    """Each group of up to 64 elements is stored as its minimum, its step, and ``bits`` an element.

    A vector is laid out as the minima (float16), the steps (float16), then the packed levels of all elements
    (:mod:`scissorhands.codec.packing`). With ``head_dim`` 64 and 4 bits that is 36 bytes, 4.5 bits an element. An
    element is off by at most half a step, ``(max - min) / 2 / (2 ** bits - 1)``, plus the rounding of minimum and step
    to float16: 2^-11 of each (at least 3e-8), the step's up to ``2 ** bits - 1`` times over. Magnitudes above 65,504
    saturate.

    Args:
        bits: Bits of an element, 2, 4 or 8.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the levels' bytes and four a group."""
        del dtype
        return packed_bytes(head_dim, self.bits) + RANGE_BYTES * (head_dim // _group(head_dim))

    def encode_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Quantize each group between its smallest and its largest element."""
        head_dim = vectors.shape[-1]
        group = _group(head_dim)
        low, step, levels = quantize(vectors.reshape(*vectors.shape[:-1], head_dim // group, group), self.bits)
        return torch.cat([low, step, packing_of(head_dim, self.bits).pack(levels.flatten(-2))], dim=-1)

    def layout(self, head_dim: int) -> Layout:
        """Return the bits and the group."""
        return Layout(self.bits, _group(head_dim), 0.0)

    def unpack(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Unpacked:
        """Return minimum plus step times level."""
        group = _group(head_dim)
        groups = head_dim // group
        start = RANGE_BYTES * groups
        if self.bits == _WHOLE:
            # Bytes are levels as they are.
            levels = data[..., start:].reshape(*data.shape[:-1], groups, group)
            return Unpacked(dequantize(data[..., :start], levels.float(), dtype).flatten(-2), None)
        packing = packing_of(head_dim, self.bits, start)
        words = packing.words(data)
        low, step = packing.numbers(words, 0, 2 * groups, torch.float16).unsqueeze(-2).chunk(2, dim=-3)
        half = step / 2
        twice = packing.unpack(words).view(*data.shape[:-2], groups, group, data.shape[-2])
        numbers = torch.addcmul(low + half * (2**self.bits - 1), twice, half)
        return Unpacked(numbers.flatten(-3, -2).mT, None)

    def decode_rows(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode row by row, which is quicker than by way of :meth:`unpack` where the rows are wanted in the end."""
        group = _group(head_dim)
        start = RANGE_BYTES * (head_dim // group)
        levels = packing_of(head_dim, self.bits, start).unpack_rows(rows)
        groups = levels.view(*rows.shape[:-1], head_dim // group, group)
        return dequantize(rows[..., :start], groups, dtype).view(levels.shape).to(dtype)


def quantize(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize each group between its smallest and its largest element.

    Args:
        groups: ``[..., groups, n]``.
        bits: Bits of a level.

    Returns:
        The bytes of the minima and of the steps, each ``[..., 2 * groups]`` uint8, and the levels, whole numbers shaped
        as ``groups``.
    """
    top = 2**bits - 1
    levels = groups.float().clamp(-LARGEST, LARGEST)
    # Quantize against the stored, rounded minimum and step, so that decoding inverts exactly what was stored.
    low = levels.amin(dim=-1).half()
    stored_low = low.float()
    spread = levels.amax(dim=-1).sub_(stored_low)
    step = spread.div_(top).clamp_(0, LARGEST).half()
    # A step of zero would leave nothing to divide by; any other number will do.
    divisor = step.float()
    divisor += divisor == 0
    levels.sub_(stored_low.unsqueeze(-1)).div_(divisor.unsqueeze(-1)).round_().clamp_(0, top)
    return low.view(torch.uint8), step.view(torch.uint8), levels


def dequantize(ranges: torch.Tensor, levels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo :func:`quantize`.

    Args:
        ranges: ``[..., 4 * groups]`` uint8, minima and steps.
        levels: ``[..., groups, n]`` float32; the numbers take its place.
        dtype: Number type whose range the numbers must not leave.

    Returns:
        Numbers, float32, shaped as ``levels``.
    """
    # contiguous() would not copy a single row, whose stride may be odd and cannot be viewed as two-byte numbers.
    low, step = ranges.clone(memory_format=torch.contiguous_format).view(torch.float16).float().chunk(2, dim=-1)
    # A minimum and all rounded steps can exceed float16 by a hair where the input did not.
    limit = min(LARGEST, torch.finfo(dtype).max)
    return levels.mul_(step.unsqueeze(-1)).add_(low.unsqueeze(-1)).clamp_(-limit, limit)


def _group(head_dim: int) -> int:
    """Return the largest group of at most 64 elements that divides ``head_dim``."""
    return math.gcd(head_dim, GROUP)
