"""Where the boundaries of a prompt lie, and keys that are equal wherever they are made, and only then."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.prefix_data import BASE, manifest_of
from support.suspended_data import identity

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.errors import CorruptRowError, MismatchError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.prefix import MAX_BOUNDARIES, PrefixManifest, boundaries
from scissorhands.suspended import Manifest

SHAPE = ModelShape(2, 2, 8, 4)
IDS = list(range(5, 305))
# Prints the keys of ``places()``.
PROGRAM = """
from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant
from scissorhands.prefix import PrefixIdentity, boundaries

base = PrefixIdentity("model", "tokenizer", "float32", "", "", "", "2", "default")
shape = ModelShape(2, 2, 8, 4)
own = grant(BudgetRequest.tokens(160), PolicyRequest("h2o"), shape, 600, codec="none")
print(*(place.key.hex() for place in boundaries(base, own, shape, list(range(5, 305)), 80)))
"""


def granted(tokens=160, policy="h2o", total=600, codec="none", shape=SHAPE, **numbers):
    return grant(BudgetRequest.tokens(tokens), PolicyRequest(policy, "", numbers), shape, total, codec=codec)


def places(own=None, ids=IDS, every=80, base=BASE, shape=SHAPE):
    return boundaries(base, own or granted(), shape, ids, every)


def test_boundaries_lie_on_the_grid_and_before_the_last_token():
    found = places()
    assert granted().parameters.chunk == 40
    assert [(place.start, place.step, place.whole) for place in found] == [
        (0, 80, False),
        (80, 160, False),
        (0, 200, True),
        (0, 240, True),
        (0, 280, True),
    ]
    assert [place.step for place in places(ids=IDS[:81])] == [80]
    assert places(ids=IDS[:80]) == ()
    # A chunk above what was asked for is one; and behind an eviction nothing short is stored.
    assert [place.step for place in places(every=10, ids=IDS[:130])] == [40, 80, 120]
    assert [place.step for place in places(every=250)] == [280]
    assert places(granted(600, total=600), every=400) == ()


def test_a_long_prompt_has_a_bounded_number():
    long = list(range(60_000))
    found = boundaries(BASE, granted(20_000, total=70_000, chunk=16), SHAPE, long, 16)
    assert len(found) == MAX_BOUNDARIES
    assert found[-1].step == 59_984


def test_keys_follow_from_the_tokens_before_them():
    one, other = places(), places(ids=[*IDS[:200], 9, *IDS[201:]])
    same = [mine.key == theirs.key for mine, theirs in zip(one, other, strict=True)]
    assert same == [True, True, True, False, False]
    assert len({place.key for place in one}) == len(one)
    # What comes behind a boundary has no part in it.
    assert [place.key for place in places(ids=IDS[:290])] == [place.key for place in one]


def test_before_an_eviction_only_the_grid_matters_behind_it_all_does():
    usual = places()
    for other, grown, whole in (
        (granted(200, chunk=40), True, False),
        (granted(160, recent=50), True, False),
        (granted(160, total=900), True, True),
        (granted(160, chunk=20), False, False),
        (granted(160, policy="tova", recent=80), False, False),
        (granted(160, codec="int8"), False, False),
    ):
        keys = {place.step: place for place in places(other)}
        for place in usual:
            there = keys.get(place.step)
            equal = there is not None and there.key == place.key
            assert equal is (whole if place.whole else grown), (other, place.step)


@pytest.mark.parametrize("name", ["model", "tokenizer", "dtype", "codec_version", "tenant"])
def test_everything_of_the_identity_is_in_the_key(name):
    one, other = places(), places(base=replace(BASE, **{name: "another"}))
    assert not {place.key for place in one} & {place.key for place in other}


def test_keys_are_those_of_every_process():
    found = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(run.stdout.strip())
    assert found == {" ".join(place.key.hex() for place in places())}
    # A change of keys is a change of the format's version.
    assert places()[0].key.hex() == "cf49b4924fa9e7bf52775e826f2676c5fff963c91c179102777e55b14180d72e"


def manifest():
    place = places()[1]
    return place, manifest_of(place, [b"k" * 100, b"v" * 50], [b"e" * 10])


def test_a_manifest_is_read_as_it_was_written():
    place, written = manifest()
    read = PrefixManifest.parse(written.pack())
    assert read == written
    assert read.state_bytes == 160
    read.check(place)


def test_a_manifest_of_anything_else_is_refused():
    place, written = manifest()
    for change in ({"start": 0}, {"step": 200}, {"key": bytes(32)}, {"epoch": 1}):
        with pytest.raises(MismatchError):
            replace(written, **change).check(place)
    for name in ("model", "tokenizer", "dtype", "policy", "budget", "resident_codec", "codec_version", "tenant"):
        with pytest.raises(MismatchError, match=name):
            replace(written, identity=replace(written.identity, **{name: "x"})).check(place)


def test_a_damaged_manifest_is_refused():
    _, written = manifest()
    data = written.pack()
    for at in range(len(data)):
        with pytest.raises(CorruptRowError):
            PrefixManifest.parse(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptRowError):
            PrefixManifest.parse(data[:at])
    for bad in ({"start": 200}, {"grown": (replace(written.grown[0], size=1 << 30),)}):
        with pytest.raises(CorruptRowError):
            PrefixManifest.parse(replace(written, **bad).pack())
    other = Manifest(identity(), 3, 1, 2, (2, 3), b"grant", written.grown).pack()
    with pytest.raises(CorruptRowError):
        PrefixManifest.parse(other)
