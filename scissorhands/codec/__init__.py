"""Codecs, one a file."""

from scissorhands.codec.base import Codec
from scissorhands.codec.int4 import Int4
from scissorhands.codec.none import NoCodec
from scissorhands.errors import InvalidRequestError

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Int4, NoCodec)}


def get_codec(name: str) -> Codec:
    """Return a codec by name.

    Raises:
        InvalidRequestError: There is no such codec.
    """
    if name not in CODECS:
        raise InvalidRequestError("codec", f"unknown codec {name!r}; allowed: {', '.join(CODECS)}")
    return CODECS[name]()


__all__ = ["CODECS", "Codec", "get_codec"]
