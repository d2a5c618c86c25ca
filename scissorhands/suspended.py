"""Suspended rows: a row's whole state as a few large parts, and the manifest that says what they are.

The manifest is written last, and is all that makes parts worth anything. All numbers are little-endian::

    magic "SCSU" | version u16 | manifest bytes u32                          the fixed start
    identity: ten length-prefixed UTF-8 strings, from model to session id
    step u32 | epoch u32 | prompt u32 | layers u32 | parts u32 | grant bytes u32
    lengths: layers times u32
    parts: parts times (bytes u32, crc u32)
    grant                                                                    as the protocol writes it
    crc u32                                                                  of all before it

A manifest tells no shapes: whoever restores a row knows them from the model and the grant, and what is stored must have
exactly the bytes that they come to (:mod:`scissorhands.row_state`). Parts are pieces of one long string of bytes, cut
without regard to layers, so that a row takes few round trips.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from isal.isal_zlib import crc32

from scissorhands.budget import Grant, ModelShape
from scissorhands.errors import CorruptRowError, MismatchError
from scissorhands.formats import EXACT
from scissorhands.framed import frame, read_frame
from scissorhands.tenant import split
from scissorhands.texts import pack_texts, unpack_texts
from scissorhands.v1 import suspension_pb2
from scissorhands.wire import policy_request

MAGIC = b"SCSU"
VERSION = 1
# The most of one part.
PART_BYTES = 4 << 20
# What Redis keeps beside a value, and its protocol when it receives one, with some room.
_VALUE_BYTES = 64
# Of a row's bytes, the part that rounding up may waste without another cut, as a divisor; and what is not worth one.
_MOST_WASTE = 32
_SMALL_WASTE = 32 << 10

_COUNTS = struct.Struct("<IIIIII")
_PART = struct.Struct("<II")
_NUMBER = struct.Struct("<I")


@dataclass(frozen=True)
class SuspendedIdentity:
    """Everything that must agree before a suspended row may go on. A difference is a miss.

    Budget and policy are what was asked for: a turn's grant follows from them and from its length, and the row takes it
    if it can (:func:`takes`). The grant that the row had, with c, m and L, is stored beside.

    Args:
        model: Hex digest of configuration and weights.
        tokenizer: Hex digest of the tokenizer.
        dtype: Number type of keys and values.
        policy: The policy asked for, with its preset and the numbers that were overridden.
        budget: The budget asked for.
        resident_codec: The format asked for that slots are resident in.
        codec_version: Version of the formats that slots are resident in.
        tokens: Hex digest of the token ids that the row has seen.
        tenant: The tenant, as the server derived it.
        session_id: The session.
    """

    model: str
    tokenizer: str
    dtype: str
    policy: str
    budget: str
    resident_codec: str
    codec_version: str
    tokens: str
    tenant: str
    session_id: str

    def check(self, asked: "SuspendedIdentity") -> None:
        """Make sure that this is what was asked for.

        Raises:
            MismatchError: It is not; names what differs.
        """
        names = [field.name for field in fields(self)]
        different = tuple(name for name in names if getattr(self, name) != getattr(asked, name))
        if different:
            raise MismatchError(different)

    def known_to_manager(self) -> "SuspendedIdentity":
        """Return the same without what only a worker can tell."""
        return replace(self, codec_version="", tokens="")


@dataclass(frozen=True)
class Part:
    """Size and checksum of one part."""

    size: int
    crc: int

    def check(self, data: bytes | memoryview) -> None:
        """Check the bytes of the part.

        Raises:
            CorruptRowError: They are not the part's.
        """
        if len(data) != self.size:
            raise CorruptRowError(f"a part is {len(data)} bytes instead of {self.size}")
        if crc32(data) != self.crc:
            raise CorruptRowError("a part fails its checksum")


@dataclass(frozen=True)
class Manifest:
    """What a suspended row is.

    Args:
        identity: Its identity.
        step: Tokens seen.
        epoch: Evictions applied.
        prompt: Position after the last token that was read as a prompt.
        lengths: n of each layer of its pool.
        grant: The grant that it had, as the protocol writes it.
        parts: Its parts, in order.
    """

    identity: SuspendedIdentity
    step: int
    epoch: int
    prompt: int
    lengths: tuple[int, ...]
    grant: bytes
    parts: tuple[Part, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    def pack(self) -> bytes:
        """Write the manifest.

        Raises:
            ValueError: It is above :data:`~scissorhands.framed.MAX_MANIFEST_BYTES`, or a text is too long.
        """
        counts = (self.step, self.epoch, self.prompt, len(self.lengths), len(self.parts), len(self.grant))
        body = b"".join(
            [
                pack_texts(asdict(self.identity)),
                _COUNTS.pack(*counts),
                struct.pack(f"<{len(self.lengths)}I", *self.lengths),
                *(_PART.pack(part.size, part.crc) for part in self.parts),
                self.grant,
            ]
        )
        return frame(MAGIC, VERSION, body)

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Read and check a manifest.

        Raises:
            CorruptRowError: The bytes fail a check, or are of another version.
        """
        return read_frame(data, MAGIC, VERSION, _parse_body)


def cut(data: memoryview) -> list[memoryview]:
    """Cut a row's bytes into parts that take little more memory in Redis than their bytes.

    Redis's allocator, jemalloc, has four sizes between a power of two and the next, so what is just above one of them
    takes up to a quarter more. Parts but the last are just below one.
    """
    pieces, at = [], 0
    while at < len(data):
        size = _next_part(len(data) - at, waste=len(data) // _MOST_WASTE)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def _next_part(left: int, waste: int) -> int:
    """Return the bytes of the next part, given how many are left and how many may be wasted by rounding up."""
    if left + _VALUE_BYTES > PART_BYTES:
        return PART_BYTES - _VALUE_BYTES
    step = 1 << max(0, (left + _VALUE_BYTES - 1).bit_length() - 3)
    fits, over = divmod(left + _VALUE_BYTES, step)
    if not over or step - over <= max(waste, _SMALL_WASTE):
        return left
    return fits * step - _VALUE_BYTES


def describe(pieces: Sequence[bytes | memoryview]) -> tuple[Part, ...]:
    """Return size and checksum of each piece."""
    return tuple(Part(len(piece), crc32(piece)) for piece in pieces)


def token_digest(ids: Sequence[int]) -> str:
    """Return the hex SHA-256 of token ids."""
    return hashlib.sha256(token_bytes(ids)).hexdigest()


def token_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as u32."""
    numbers = array("I", ids)
    assert numbers.itemsize == _NUMBER.size
    return numbers.tobytes()


def asked_identity(asked: suspension_pb2.ResumeSessionRequest) -> SuspendedIdentity:
    """Return the identity of the row that a turn asks for, as far as a request tells: not codec version and tokens."""
    policy = policy_request(asked.policy)
    numbers = "".join(f" {name}={value}" for name, value in sorted(policy.parameters.items()))
    unit = asked.budget.WhichOneof("amount")
    tenant, session_id = split(asked.session_id)
    return SuspendedIdentity(
        model=asked.model.fingerprint,
        tokenizer=asked.model.tokenizer_fingerprint,
        dtype=asked.model.dtype,
        policy=f"{policy.name}:{policy.preset}{numbers}",
        budget=f"{unit}={getattr(asked.budget, unit)!r}" if unit else "default",
        resident_codec=asked.resident_codec or EXACT,
        codec_version="",
        tokens="",
        tenant=tenant,
        session_id=session_id,
    )


def takes(grant: Grant, held: Grant, manifest: Manifest, shape: ModelShape, total: int) -> bool:
    """Whether a row that was suspended under the grant ``held`` can go on under ``grant``.

    Every slot must find room, in the form in which it is held. A grant of the same policy for a longer sequence has
    more slots, so it usually can. The ring of a sliding layer may only grow before it has come round.

    Args:
        grant: The grant to go on under.
        held: The grant that the row had.
        manifest: The row.
        shape: The model's sizes.
        total: Tokens that the sequence will have.
    """
    alike = (
        (grant.policy, grant.preset, grant.parameters.window) == (held.policy, held.preset, held.parameters.window)
        and (grant.by_head, grant.codecs) == (held.by_head, held.codecs)
        and len(grant.layer_slots) == len(held.layer_slots) == len(manifest.lengths)
    )
    if not alike:
        return False
    stored = grant.shape_of(shape)
    for layer, (slots, before) in enumerate(zip(grant.layer_slots, held.layer_slots, strict=True)):
        window = stored.window(layer)
        if manifest.lengths[layer] > slots:
            return False
        if window and (slots != min(window, total) or (slots != before and manifest.step > before)):
            return False
    return True


def _parse_body(body: memoryview) -> Manifest:
    texts, at = unpack_texts(body, 0, len(fields(SuspendedIdentity)))
    step, epoch, prompt, layers, parts, grant_bytes = _COUNTS.unpack_from(body, at)
    at += _COUNTS.size
    if len(body) - at != layers * _NUMBER.size + parts * _PART.size + grant_bytes:
        raise ValueError("its tables do not fit its size")
    lengths = struct.unpack_from(f"<{layers}I", body, at)
    at += layers * _NUMBER.size
    table = tuple(Part(*entry) for entry in _PART.iter_unpack(body[at : at + parts * _PART.size]))
    at += parts * _PART.size
    if any(not 0 < part.size <= PART_BYTES for part in table):
        raise ValueError("a part has a size out of range")
    return Manifest(SuspendedIdentity(*texts), step, epoch, prompt, lengths, bytes(body[at:]), table)
