"""Rotations that spread a vector's energy evenly over its elements."""

import hashlib
import math

import torch


def rotation(size: int) -> torch.Tensor:
    """Return an orthogonal ``[size, size]`` float64 matrix, always the same for one size.

    For a power of two it is a Hadamard matrix, the butterfly of QuIP# and QuaRot (arXiv 2402.04396, 2404.00456); for
    other sizes the product with a cosine transform of the odd rest. Its columns have signs that a hash gives, so that
    no direction that a model prefers is one that it cannot spread. As one matrix product it is quicker than a butterfly
    for all sizes of a head.
    """
    power = size & -size
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64) / math.sqrt(2), matrix)
    matrix = torch.kron(_cosines(size // power), matrix)
    digest = hashlib.shake_128(f"scissorhands rotation {size}".encode()).digest(size)
    return matrix * torch.tensor([1.0 if byte % 2 else -1.0 for byte in digest], dtype=torch.float64)


def _cosines(size: int) -> torch.Tensor:
    """Return the orthonormal discrete cosine transform (DCT-II)."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * index.unsqueeze(1) * (index + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
