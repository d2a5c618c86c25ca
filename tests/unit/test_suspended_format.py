"""The manifest of a suspended row: written and read again, refused when a single bit is wrong."""

from dataclasses import fields, replace

import pytest
from support.manager_data import model
from support.suspended_data import asked, identity, manifest_of

from scissorhands.errors import CorruptRowError, MismatchError
from scissorhands.framed import MAX_MANIFEST_BYTES
from scissorhands.suspended import (
    PART_BYTES,
    Manifest,
    SuspendedIdentity,
    asked_identity,
    cut,
    describe,
    token_digest,
)
from scissorhands.v1 import budget_pb2

PIECES = [b"first", b"second part"]


def test_what_is_written_is_read():
    manifest = manifest_of(PIECES)
    assert Manifest.parse(manifest.pack()) == manifest
    assert manifest.state_bytes == sum(map(len, PIECES))
    empty = manifest_of([], lengths=())
    assert Manifest.parse(empty.pack()) == empty


def test_every_flipped_bit_and_every_truncation_is_found():
    data = manifest_of(PIECES).pack()
    for index in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[index] ^= 1 << bit
            with pytest.raises(CorruptRowError):
                Manifest.parse(bytes(broken))
    for size in range(len(data)):
        with pytest.raises(CorruptRowError):
            Manifest.parse(data[:size])
    with pytest.raises(CorruptRowError):
        Manifest.parse(data + b"\0")


def test_sizes_out_of_range_are_refused():
    for size in (0, PART_BYTES + 1):
        manifest = manifest_of(PIECES)
        with pytest.raises(CorruptRowError):
            Manifest.parse(replace(manifest, parts=(replace(manifest.parts[0], size=size),)).pack())
    with pytest.raises(ValueError, match="above the limit"):
        manifest_of([b"x"] * (MAX_MANIFEST_BYTES // 8)).pack()
    with pytest.raises(ValueError, match="policy"):
        manifest_of(PIECES, policy="x" * 5000).pack()


def allocated(size):
    """Return what jemalloc takes for a value and what is kept beside it: four sizes between powers of two."""
    step = 1 << (size + 64 - 1).bit_length() - 3
    return -(-(size + 64) // step) * step


@pytest.mark.parametrize("size", [PART_BYTES, 2 * PART_BYTES + 4, 1 << 20, (1 << 20) + 1, 5_000_000, 93_749_823])
def test_parts_are_few_and_take_hardly_more_memory_than_their_bytes(size):
    pieces = cut(memoryview(bytes(size)))
    assert sum(map(len, pieces)) == size
    assert all(0 < len(piece) < PART_BYTES for piece in pieces)
    assert len(pieces) <= -(-size // PART_BYTES) + 3
    assert sum(map(allocated, map(len, pieces))) <= 1.035 * size + (32 << 10)


def test_parts_are_in_order_and_checked():
    data = memoryview(bytes(range(256)) * (PART_BYTES // 256) * 2 + b"rest")
    pieces = cut(data)
    assert b"".join(pieces) == data
    assert cut(memoryview(b"")) == []
    part = describe(pieces)[0]
    part.check(pieces[0])
    for wrong in (pieces[1], pieces[0][:-1], b""):
        with pytest.raises(CorruptRowError):
            part.check(wrong)


@pytest.mark.parametrize("name", [field.name for field in fields(SuspendedIdentity)])
def test_every_difference_is_named(name):
    identity().check(identity())
    with pytest.raises(MismatchError) as caught:
        identity().check(identity(**{name: "another"}))
    assert caught.value.different == (name,)


def test_what_a_turn_asks_for_is_in_its_identity():
    usual = asked_identity(asked())
    changes = {
        "policy": asked(policy=budget_pb2.Policy(name="tova")),
        "budget": asked(budget=budget_pb2.Budget(fraction=0.5)),
        "resident_codec": asked(resident_codec="int4"),
        "session_id": asked(session_id="s2"),
        "model": asked(model=model(fingerprint="e" * 64)),
        "tokenizer": asked(model=model(tokenizer_fingerprint="e" * 64)),
        "dtype": asked(model=model(dtype="bfloat16")),
    }
    for name, other in changes.items():
        with pytest.raises(MismatchError) as caught:
            asked_identity(other).check(usual)
        assert caught.value.different == (name,)
    with pytest.raises(MismatchError, match="tenant"):
        asked_identity(asked(session_id="two/s1")).check(usual)
    numbers = budget_pb2.Policy(name="h2o", parameters={"recent": 7})
    with pytest.raises(MismatchError, match="policy"):
        asked_identity(asked(policy=numbers)).check(usual)


def test_digests_of_tokens_tell_them_apart():
    assert len({token_digest(ids) for ids in ([], [1], [2], [1, 2], [256], [0, 1])}) == 6
