"""4 bits after a rotation, as QuaRot stores its cache (Ashkboos et al., NeurIPS 2024, arXiv 2404.00456, section 4)."""

from scissorhands.codec.packing import Group
from scissorhands.codec.rotation import rotation
from scissorhands.codec.scaled import EVEN, Scaled


def int4_hadamard(head_dim: int) -> Scaled:
    """Return the codec of keys and of values: even steps on both sides of zero, a scale for each vector.

    The rotation leaves no element much larger than the others, so a vector needs one scale and no minimum: with
    ``head_dim`` 64 a vector takes 34 bytes, 4.25 bits an element.
    """
    matrix = rotation(head_dim)
    return Scaled([Group(head_dim, 4)], matrix, matrix.T, EVEN)
