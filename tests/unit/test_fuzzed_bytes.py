"""Segments and manifests of any content: whole ones are read as they were written, broken ones refused in order."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzed_bytes import DECODERS, Edit, allocated, edited, examples, most_allocated

from scissorhands.errors import CorruptSegmentError
from scissorhands.prefix import KEY_BYTES, PrefixIdentity, PrefixManifest
from scissorhands.segment import SegmentIdentity, build_segment, check_segment
from scissorhands.summary import read_summary, summary_bytes
from scissorhands.suspended import PART_BYTES, Manifest, Part, SuspendedIdentity

U16, U32 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 32) - 1)
LENGTHS = st.lists(U32, max_size=5).map(tuple)
PARTS = st.lists(st.builds(Part, st.integers(1, PART_BYTES), U32), max_size=5).map(tuple)
EDITS = st.builds(Edit, st.floats(0, 1), st.integers(0, 24), st.binary(max_size=16))

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def identities(kind):
    texts = st.text("aä中\0", max_size=12)
    return st.builds(kind, **{field.name: texts for field in fields(kind)})


@few
@given(st.data())
def test_any_segment_is_read_as_it_was_written(data):
    identity, epoch, step = data.draw(identities(SegmentIdentity)), data.draw(U32), data.draw(U32)
    layers, heads, head_dim = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)), data.draw(U16)
    count = layers * heads
    sections = data.draw(st.lists(st.tuples(U32, st.binary(max_size=40)), min_size=count, max_size=count))
    summary = data.draw(st.binary(max_size=40))
    built = build_segment(identity, epoch, step, (layers, heads, head_dim), sections, summary)
    header = check_segment(built)
    assert header.identity == identity
    assert (header.epoch, header.step, header.head_dim) == (epoch, step, head_dim)
    assert (header.layers, header.kv_heads, header.size) == (layers, heads, len(built))
    assert [own.slots for own in header.sections] == [slots for slots, _ in sections]
    assert [built[own.offset :][: own.size] for own in header.sections] == [piece for _, piece in sections]
    assert built[header.summary.offset :][: header.summary.size] == summary


@few
@given(st.builds(Manifest, identities(SuspendedIdentity), U32, U32, U32, LENGTHS, st.binary(max_size=40), PARTS))
def test_any_manifest_of_a_row_is_read_as_it_was_written(manifest):
    assert Manifest.parse(manifest.pack()) == manifest


@few
@given(st.data())
def test_any_manifest_of_a_prefix_is_read_as_it_was_written(data):
    key = data.draw(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
    start = data.draw(st.integers(0, (1 << 32) - 2))
    step = data.draw(st.integers(start + 1, (1 << 32) - 1))
    rest = (data.draw(own) for own in (U32, LENGTHS, PARTS, PARTS))
    manifest = PrefixManifest(key, data.draw(identities(PrefixIdentity)), start, step, *rest)
    assert PrefixManifest.parse(manifest.pack()) == manifest


@pytest.mark.parametrize("name", DECODERS)
def test_examples_are_whole(name):
    read, seal = DECODERS[name]
    for data in examples(name):
        assert seal(data) == data
        # The segment without a summary is refused only where a summary is asked for.
        assert read(data) or (name == "segment" and check_segment(data).summary.size == 0)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_broken_bytes_are_refused_in_order_and_cost_little(name, is_sealed):
    read, seal = DECODERS[name]

    @few
    @given(st.sampled_from(examples(name)), st.lists(EDITS, max_size=4))
    def check(data, edits):
        broken = edited(data, edits)
        broken = seal(broken) if is_sealed else broken
        assert allocated(read, broken) <= most_allocated(broken)

    check()


@pytest.mark.parametrize("name", DECODERS)
def test_arbitrary_bytes_are_refused(name):
    read, seal = DECODERS[name]

    @few
    @given(st.binary(max_size=200))
    def check(data):
        assert not read(data)
        read(seal(data))

    check()


def test_a_summary_of_keys_without_elements_is_read():
    read = read_summary(bytes(summary_bytes([17, 0], 0)), [17, 0], 0)
    assert [own.centroids.shape for own in read] == [(2, 4, 0), (0, 4, 0)]
    with pytest.raises(CorruptSegmentError, match="summary is 1 bytes"):
        read_summary(b"x", [17, 0], 0)
