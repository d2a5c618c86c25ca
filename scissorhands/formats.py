"""Formats: what a codec's name says of its bytes, without torch. The manager and the worker count by them alike.

A name is that of a family, and the bits of keys and values behind a colon where the family leaves a choice:
``int4``, ``turboquant:k4v3``. One number stands for both: ``turboquant:3`` is ``turboquant:k3v3``.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from scissorhands.errors import InvalidRequestError

# Numbers as they are.
EXACT = "none"
# The file beside a model that holds what calibrated formats are fitted to (:mod:`scissorhands.codec.statistics`).
STATISTICS_FILE = "scissorhands-statistics.safetensors"
# Elements of a group of int4 and int8 that share minimum and step.
GROUP = 64
# Tokens of a block of kivi, whose keys share minimum and step by channel.
BLOCK = 32
# A rotated vector's scale, in bfloat16.
SCALE_BYTES = 2
# A minimum and a step, each in float16.
RANGE_BYTES = 4
# Units of a transformed vector, above which they are made larger where that is possible.
_MOST_UNITS = 16
_BITS = re.compile(r"k(\d(?:\.5)?)v(\d(?:\.5)?)|(\d(?:\.5)?)")


@dataclass(frozen=True)
class Family:
    """Formats that differ in their bits only.

    Args:
        bits: The bits of an element that it has; one means that names carry none.
        default: The bits of keys and values that a bare name means.
        vector_bytes: Returns the bytes of one vector of ``head_dim`` elements at so many bits, for a number type of so
            many bytes; of a format whose rows are not independent, its share of a whole block.
        value_bytes: The same of values, where they are stored in another way than keys.
        independent: Whether every vector is encoded on its own, so that slots can be evicted apart. Only such a format
            can be resident.
        calibrated: Whether it needs a model's measured statistics.
        multiple: What ``head_dim`` must be a multiple of.
    """

    bits: tuple[float, ...]
    default: float
    vector_bytes: Callable[[int, float, int], int]
    value_bytes: Callable[[int, float, int], int] | None = None
    independent: bool = True
    calibrated: bool = False
    multiple: int = 8


def _grouped(head_dim: int, bits: float, element_bytes: int) -> int:
    del element_bytes
    return int(head_dim * bits) // 8 + RANGE_BYTES * (head_dim // math.gcd(head_dim, GROUP))


def _scaled(head_dim: int, bits: float, element_bytes: int) -> int:
    del element_bytes
    return int(head_dim * bits) // 8 + SCALE_BYTES


def _transformed(head_dim: int, bits: float, element_bytes: int) -> int:
    del element_bytes
    unit = transform_unit(head_dim)
    return int(head_dim * bits) // (2 * unit) * unit // 4 + SCALE_BYTES


def _by_channel(head_dim: int, bits: float, element_bytes: int) -> int:
    del element_bytes
    return int(head_dim * bits) // 8 + RANGE_BYTES * head_dim // BLOCK


def transform_unit(head_dim: int) -> int:
    """Return how many elements of a transformed vector get or lose bits together: 8, or more of a large vector."""
    unit = 8
    while head_dim > _MOST_UNITS * unit and head_dim % (2 * unit) == 0:
        unit *= 2
    return unit


def _plain(head_dim: int, bits: float, element_bytes: int) -> int:
    del bits
    return head_dim * element_bytes


FAMILIES: dict[str, Family] = {
    EXACT: Family((0,), 0, _plain, multiple=1),
    "int8": Family((8,), 8, _grouped, multiple=1),
    "int4": Family((4,), 4, _grouped, multiple=2),
    "int4-hadamard": Family((4,), 4, _scaled, multiple=2),
    "turboquant": Family((2, 3, 4), 4, _scaled),
    "kivi": Family((2, 4), 4, _by_channel, _grouped, independent=False),
    "block-gtq": Family((2, 3, 4), 4, _scaled, calibrated=True),
    "klt": Family((2, 2.5, 3, 3.5, 4, 4.5, 5, 6), 4, _transformed, calibrated=True),
}


@dataclass(frozen=True)
class Format:
    """The format of one codec.

    Args:
        name: Its full name, equal for equal formats.
        family: Name of its family.
        key_bits: Bits of an element of a key, without scales.
        value_bits: Bits of an element of a value, without scales.
    """

    name: str
    family: str
    key_bits: float
    value_bits: float

    @property
    def independent(self) -> bool:
        """Whether every vector is encoded on its own."""
        return FAMILIES[self.family].independent

    @property
    def calibrated(self) -> bool:
        """Whether it needs a model's measured statistics."""
        return FAMILIES[self.family].calibrated

    def key_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Return the bytes of one key, scales included.

        Raises:
            InvalidRequestError: The format does not hold vectors of this size.
        """
        family = self._fitting(head_dim)
        return family.vector_bytes(head_dim, self.key_bits, element_bytes)

    def value_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Return the bytes of one value, scales included.

        Raises:
            InvalidRequestError: The format does not hold vectors of this size.
        """
        family = self._fitting(head_dim)
        return (family.value_bytes or family.vector_bytes)(head_dim, self.value_bits, element_bytes)

    def slot_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Return the bytes of a key and a value."""
        return self.key_bytes(head_dim, element_bytes) + self.value_bytes(head_dim, element_bytes)

    def _fitting(self, head_dim: int) -> Family:
        family = FAMILIES[self.family]
        if head_dim % family.multiple:
            raise InvalidRequestError(
                "codec", f"{self.family} needs a head_dim that is a multiple of {family.multiple}, got {head_dim}"
            )
        return family


@lru_cache
def parse(name: str) -> Format:
    """Return the format of a name.

    Raises:
        InvalidRequestError: There is no such format.
    """
    family_name, colon, bits_text = name.partition(":")
    family = FAMILIES.get(family_name)
    if family is None:
        raise InvalidRequestError("codec", f"unknown codec {name!r}; allowed: {', '.join(FAMILIES)}")
    if not colon:
        key, value = family.default, family.default
    else:
        match = _BITS.fullmatch(bits_text)
        key, value = (float(text or match[3]) for text in match.group(1, 2)) if match else (math.nan, math.nan)
    if (len(family.bits) == 1 and colon) or not {key, value} <= set(family.bits):
        allowed = ", ".join(f"{bits:g}" for bits in family.bits)
        wanted = f"bits of {allowed}, such as {family_name}:k{family.default:g}v{family.default:g}"
        raise InvalidRequestError("codec", f"{name!r}: {family_name} takes {wanted if family.bits[1:] else 'no bits'}")
    full = family_name if len(family.bits) == 1 else f"{family_name}:k{key:g}v{value:g}"
    return Format(full, family_name, key, value)


def resident(name: str) -> Format:
    """Return the format of a name that slots are to be resident in.

    Raises:
        InvalidRequestError: There is no such format, or its rows are not independent.
    """
    found = parse(name)
    if not found.independent:
        raise InvalidRequestError(
            "codec", f"{name} cannot be resident: its rows are not independent, so none can be evicted alone"
        )
    return found
