"""Prefixes: what rows are at boundaries of their prompts, under keys that are equal wherever they are made.

Boundaries lie on the chunk grid, since what a row holds in between depends on where its prompt ends. At a boundary that
a row reaches without evicting, keys and values have only grown: what is stored there is what came since the boundary
before, and the evidence of all slots. Budgets and lengths do not matter, only the grid does, so all requests share it.
At a boundary behind the first eviction the whole state is stored, under a key with every number of the grant: it is
of use to a request of the same policy, budget and grid only.

Keys are SHA-256, chained: of the identity, then of the key before and the token ids of a chunk. The key of a whole
state is that of the key at its place in the chain and of its own identity.

A manifest, all numbers little-endian::

    magic "SCPX" | version u16 | manifest bytes u32                          the fixed start
    key, 32 bytes | identity: eight length-prefixed UTF-8 strings
    start u32 | step u32 | epoch u32 | layers u32 | grown parts u32 | evidence parts u32
    lengths: layers times u32
    parts: grown parts, then evidence parts, each (bytes u32, crc u32)
    crc u32                                                                  of all before it
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

from scissorhands.budget import Grant, ModelShape
from scissorhands.errors import MismatchError
from scissorhands.formats import EXACT
from scissorhands.framed import frame, read_frame
from scissorhands.grant import codecs_text, grant_text, slots_text
from scissorhands.suspended import PART_BYTES, Part, token_bytes
from scissorhands.texts import pack_texts, unpack_texts

MAGIC = b"SCPX"
VERSION = 1
KEY_BYTES = 32
# Whole states that are looked for at most: those of the longest prefixes.
MAX_WHOLE = 256
# Of a request's boundaries. A row of 256 tokens a boundary comes to 200,000 tokens.
MAX_BOUNDARIES = 1024

_COUNTS = struct.Struct("<IIIIII")
_PART = struct.Struct("<II")
_NUMBER = struct.Struct("<I")


@dataclass(frozen=True)
class PrefixIdentity:
    """Everything besides the token ids that decides what a row is at a boundary. It is part of every key.

    Args:
        model: Hex digest of configuration and weights.
        tokenizer: Hex digest of the tokenizer.
        dtype: Number type of keys and values.
        policy: The policy and the numbers of it that matter: window and chunk before the first eviction, all behind it.
        budget: Digest of B of each layer or KV head behind the first eviction; before it, only whether heads are held
            apart.
        resident_codec: Format that slots are resident in.
        codec_version: Its version.
        tenant: The tenant, as the server derived it.
    """

    model: str
    tokenizer: str
    dtype: str
    policy: str
    budget: str
    resident_codec: str
    codec_version: str
    tenant: str

    def before_eviction(self, grant: Grant) -> "PrefixIdentity":
        """Return the identity under a grant of what has not evicted."""
        numbers = grant.parameters
        policy = f"{grant.policy}:{grant.preset} window={numbers.window} chunk={numbers.chunk}"
        return self._with(grant, policy, "by head" if grant.by_head else "by layer")

    def after_eviction(self, grant: Grant) -> "PrefixIdentity":
        """Return the identity under a grant of what has evicted."""
        return self._with(grant, grant_text(grant), hashlib.sha256(slots_text(grant).encode()).hexdigest())

    def _with(self, grant: Grant, policy: str, budget: str) -> "PrefixIdentity":
        resident = codecs_text(grant) if grant.codecs else EXACT
        return replace(self, policy=policy, budget=budget, resident_codec=resident)

    def pack(self) -> bytes:
        """Write the identity.

        Raises:
            ValueError: A text is too long.
        """
        return pack_texts(asdict(self))


@dataclass(frozen=True)
class Boundary:
    """A place in a prompt at which a row's state may be stored.

    Args:
        step: Tokens before it.
        key: The key of what is stored.
        start: Where the boundary before it lies, from which on keys and values are stored; 0 of a whole state.
        identity: The identity of what is stored.
        whole: Whether the row has evicted by then.
    """

    step: int
    key: bytes
    start: int
    identity: PrefixIdentity
    whole: bool


def boundaries(
    base: PrefixIdentity, grant: Grant, shape: ModelShape, ids: Sequence[int], every: int
) -> tuple[Boundary, ...]:
    """Return the boundaries of a prompt, in order. Its last token is behind all of them: it is always read.

    Behind the first eviction all chunks end at one, so that what prompts share is found however they go on.

    Args:
        base: The identity, as far as it does not depend on the grant.
        grant: The grant of the row.
        shape: The model's sizes.
        ids: Token ids of the prompt.
        every: Tokens between boundaries before the first eviction, about: a multiple of the chunk, not above this. Of
            a whole state it is the least: what is shorter is soon read.
    """
    chunk = grant.parameters.chunk
    stride = max(1, every // chunk) * chunk
    shared = grant.shape_of(shape).global_layers
    room = min((grant.layer_slots[layer] for layer in shared), default=len(ids))
    before, after = base.before_eviction(grant), base.after_eviction(grant)
    grown, whole = [], []
    link = hashlib.sha256(MAGIC + bytes([VERSION]) + before.pack()).digest()
    own = after.pack()
    for step in range(chunk, len(ids), chunk):
        link = hashlib.sha256(link + token_bytes(ids[step - chunk : step])).digest()
        if step > room:
            if step >= every:
                whole.append(Boundary(step, hashlib.sha256(link + own).digest(), 0, after, whole=True))
        elif step % stride == 0:
            grown.append(Boundary(step, link, step - stride, before, whole=False))
    return (*grown[: MAX_BOUNDARIES - MAX_WHOLE], *whole[-MAX_WHOLE:])


@dataclass(frozen=True)
class PrefixManifest:
    """What is stored at a boundary.

    Args:
        key: Its key.
        identity: Its identity.
        start: Tokens of the boundary that it goes on from.
        step: Tokens before it.
        epoch: Evictions applied.
        lengths: n of each layer of the pool.
        grown: Parts of the keys, values and positions since ``start``, in order.
        evidence: Parts of the evidence of all slots, in order.
    """

    key: bytes
    identity: PrefixIdentity
    start: int
    step: int
    epoch: int
    lengths: tuple[int, ...]
    grown: tuple[Part, ...]
    evidence: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in order."""
        return self.grown + self.evidence

    @property
    def state_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    def check(self, asked: Boundary) -> None:
        """Make sure that this is what belongs to a boundary.

        Raises:
            MismatchError: It is not; names what differs.
        """
        found = {"key": self.key, "start": self.start, "step": self.step, "evictions": self.epoch > 0}
        wanted = {"key": asked.key, "start": asked.start, "step": asked.step, "evictions": asked.whole}
        found |= asdict(self.identity)
        wanted |= asdict(asked.identity)
        different = tuple(name for name in wanted if found[name] != wanted[name])
        if different:
            raise MismatchError(different)

    def pack(self) -> bytes:
        """Write the manifest.

        Raises:
            ValueError: It is above :data:`~scissorhands.framed.MAX_MANIFEST_BYTES`, or a text is too long.
        """
        sizes = (len(self.lengths), len(self.grown), len(self.evidence))
        body = b"".join(
            [
                self.key,
                self.identity.pack(),
                _COUNTS.pack(self.start, self.step, self.epoch, *sizes),
                struct.pack(f"<{len(self.lengths)}I", *self.lengths),
                *(_PART.pack(part.size, part.crc) for part in self.parts),
            ]
        )
        return frame(MAGIC, VERSION, body)

    @classmethod
    def parse(cls, data: bytes) -> "PrefixManifest":
        """Read and check a manifest.

        Raises:
            CorruptRowError: The bytes fail a check, or are of another version.
        """
        return read_frame(data, MAGIC, VERSION, _parse_body)


class PartPlace(NamedTuple):
    """A part of a chain of boundaries.

    Args:
        boundary: Index of its boundary.
        rank: Index among the boundary's parts.
        part: The part.
        evidence: Whether it is of the evidence.
    """

    boundary: int
    rank: int
    part: Part
    evidence: bool


def in_transfer(chain: Sequence[PrefixManifest]) -> list[PartPlace]:
    """Return the parts of boundaries that go on from one another in the order in which they are sent.

    The evidence of the last comes first: every layer needs it. Then what grew, first parts first: so the first layers
    of all boundaries have come when the last are still on their way.
    """
    last = len(chain) - 1
    first = len(chain[last].grown)
    evidence = [PartPlace(last, first + index, part, evidence=True) for index, part in enumerate(chain[last].evidence)]
    grown = [
        PartPlace(at, index, part, evidence=False)
        for at, one in enumerate(chain)
        for index, part in enumerate(one.grown)
    ]
    return evidence + sorted(grown, key=lambda place: place.rank)


def _parse_body(body: memoryview) -> PrefixManifest:
    key = bytes(body[:KEY_BYTES])
    texts, at = unpack_texts(body, KEY_BYTES, len(fields(PrefixIdentity)))
    start, step, epoch, layers, grown, evidence = _COUNTS.unpack_from(body, at)
    at += _COUNTS.size
    if len(body) - at != layers * _NUMBER.size + (grown + evidence) * _PART.size:
        raise ValueError("its tables do not fit its size")
    lengths = struct.unpack_from(f"<{layers}I", body, at)
    at += layers * _NUMBER.size
    table = tuple(Part(*entry) for entry in _PART.iter_unpack(body[at:]))
    if any(not 0 < part.size <= PART_BYTES for part in table):
        raise ValueError("a part has a size out of range")
    if start >= step:
        raise ValueError("it begins behind its end")
    return PrefixManifest(key, PrefixIdentity(*texts), start, step, epoch, lengths, table[:grown], table[grown:])
