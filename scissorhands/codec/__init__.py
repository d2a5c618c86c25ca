"""Codecs, one a file: from a format's name (:mod:`scissorhands.formats`) to what encodes and decodes."""

from collections.abc import Callable
from functools import lru_cache

from scissorhands.codec.base import Codec, RowCodec, VectorCodec
from scissorhands.codec.grouped import Grouped
from scissorhands.codec.int4_hadamard import int4_hadamard
from scissorhands.codec.kivi import ByChannel
from scissorhands.codec.none import Exact
from scissorhands.codec.statistics import Statistics
from scissorhands.codec.turboquant import turboquant
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import Format, parse

VERSION = "2"
# What makes the codecs of values, and of keys where they are encoded alike, of the families that need no statistics,
# from head_dim and bits.
_MAKERS: dict[str, Callable[[int, float], VectorCodec]] = {
    "none": lambda _, __: Exact(),
    "int8": lambda _, bits: Grouped(int(bits)),
    "int4": lambda _, bits: Grouped(int(bits)),
    "int4-hadamard": lambda head_dim, _: int4_hadamard(head_dim),
    "turboquant": lambda head_dim, bits: turboquant(head_dim, int(bits)),
    "kivi": lambda _, bits: Grouped(int(bits)),
    "block-gtq": lambda head_dim, bits: turboquant(head_dim, int(bits)),
}


def get_codec(name: str, head_dim: int, statistics: Statistics | None = None, heads: slice | None = None) -> Codec:
    """Return a codec by the name of its format.

    Args:
        name: The name.
        head_dim: Elements of a key.
        statistics: What was measured of the model; only calibrated formats need it.
        heads: The KV heads to encode, counted over all layers; only calibrated formats depend on them.

    Raises:
        InvalidRequestError: There is no such format, it does not fit ``head_dim``, or statistics are missing.
    """
    found = parse(name)
    found.slot_bytes(head_dim, element_bytes=1)
    if not found.calibrated:
        return _plain(found, head_dim)
    if statistics is None:
        raise InvalidRequestError("codec", f"{name} needs a model's statistics: run scissorhands calibrate first")
    version = codec_version(name, statistics)
    if found.family == "block-gtq":
        values = _MAKERS[found.family](head_dim, found.value_bits)
        return Codec(found, version, statistics.rotary_codec(found.key_bits, heads), values)
    keys = statistics.codec("keys", found.key_bits, heads)
    return Codec(found, version, keys, statistics.codec("values", found.value_bits, heads))


def codec_version(name: str, statistics: Statistics | None = None) -> str:
    """Return the version of a format's bytes; of a calibrated one it tells the statistics."""
    return f"{VERSION}-{statistics.digest}" if statistics and parse(name).calibrated else VERSION


@lru_cache
def _plain(found: Format, head_dim: int) -> Codec:
    make = _MAKERS[found.family]
    keys = ByChannel(int(found.key_bits)) if found.family == "kivi" else make(head_dim, found.key_bits)
    return Codec(found, VERSION, keys, make(head_dim, found.value_bits))


__all__ = ["Codec", "RowCodec", "Statistics", "VectorCodec", "codec_version", "get_codec"]
