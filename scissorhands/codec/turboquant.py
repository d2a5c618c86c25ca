"""Rotation, scale and the codebook of a normal variable (TurboQuant, Zandieh et al. 2025, arXiv 2504.19874)."""

from scissorhands.codec.packing import Group
from scissorhands.codec.rotation import rotation
from scissorhands.codec.scaled import CUBIC, Scaled


def turboquant(head_dim: int, bits: int) -> Scaled:
    """Return the codec of keys or of values at 2 to 4 bits an element, and 16 bits a vector.

    The paper scales by the norm; here the scale is the best of some that are tried. Its second stage, which
    makes products unbiased at a bit an element, is left out: at equal bits it loses under a softmax.
    """
    matrix = rotation(head_dim)
    return Scaled([Group(head_dim, bits)], matrix, matrix.T, CUBIC)
