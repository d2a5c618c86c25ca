"""Between the core's types and the messages: both ends read what the other wrote."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.errors import InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.plan import plan
from scissorhands.plan_wire import plan_message, plan_requests, read_plan, read_snapshot, snapshot_parts
from scissorhands.profile import Profile
from scissorhands.snapshot import LayerEvidence, Plan, Snapshot, pack
from scissorhands.v1 import budget_pb2, cache_manager_pb2, model_pb2, plan_pb2
from scissorhands.wire import (
    budget_message,
    budget_request,
    grant_message,
    model_shape,
    policy_message,
    policy_request,
    profile_message,
    read_grant,
    read_profile,
)

SIZES = {"layers": 2, "kv_heads": 3, "head_dim": 8, "element_bytes": 4}
SPEC = cache_manager_pb2.SessionSpec(session_id="s", model=model_pb2.ModelInfo(**SIZES))


def make_snapshot(lengths=(5, 9), kv_heads=3, largest=70_000, seed=0):
    generator = np.random.default_rng(seed)
    layers = []
    for length in lengths:
        positions = np.stack([np.sort(generator.choice(largest, length, replace=False)) for _ in range(kv_heads)])
        signals = {
            "mass": generator.random((kv_heads, length), dtype=np.float32),
            "low_count": generator.integers(0, 256, (kv_heads, length)),
            "token_kind": generator.integers(0, 3, (kv_heads, length)),
            "expected_attention": generator.random((kv_heads, length), dtype=np.float32),
            "redundancy": generator.random((kv_heads, length), dtype=np.float32) - 0.5,
            "window_mass": generator.random((kv_heads, length), dtype=np.float32),
        }
        layers.append(LayerEvidence(positions, signals))
    return Snapshot(4, largest, 8, 1, tuple(layers), prompt=largest // 2)


def parts(snapshot, part_bytes=1):
    written = list(snapshot_parts(snapshot, SPEC, part_bytes))
    # As they come from the wire.
    read = [cache_manager_pb2.SnapshotPart.FromString(part.SerializeToString()) for part in written]
    return read[0].header, [part.evidence for part in read[1:]], 3


@pytest.mark.parametrize(
    "request_",
    [
        BudgetRequest.tokens(2**40),
        BudgetRequest.bytes(123),
        BudgetRequest.fraction(0.3),
        BudgetRequest.compression(7.5),
    ],
)
def test_budgets_round_trip(request_):
    assert budget_request(budget_message(request_)) == request_


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (budget_pb2.Budget(), "budget.amount"),
        (budget_pb2.Budget(tokens=0), "budget.tokens"),
        (budget_pb2.Budget(fraction=float("nan")), "budget.fraction"),
        (budget_pb2.Budget(fraction=float("inf")), "budget.fraction"),
        (budget_pb2.Budget(fraction=-1), "budget.fraction"),
        (budget_pb2.Budget(compression=1), "budget.compression"),
        (budget_pb2.Budget(compression=float("nan")), "budget.compression"),
    ],
)
def test_bad_budgets_name_the_field(message, field):
    with pytest.raises(InvalidRequestError) as caught:
        budget_request(message)
    assert caught.value.field == field


def test_policies_round_trip():
    request = PolicyRequest("scissorhands", "paper", {"recent": 20})
    assert policy_request(policy_message(request)) == request


def test_a_preset_may_stand_behind_the_name():
    assert policy_request(budget_pb2.Policy(name="scissorhands:paper")) == PolicyRequest("scissorhands", "paper")
    assert policy_request(budget_pb2.Policy(name="h2o")) == PolicyRequest("h2o")


def test_grants_round_trip():
    shape = ModelShape(2, 3, 8, 4)
    granted = grant(BudgetRequest.fraction(0.001), PolicyRequest("scissorhands", "paper"), shape, 5000)
    assert granted.raised
    message = grant_message(granted, budget_pb2.GRANT_SOURCE_MANAGER, "int4")
    assert (message.source, message.codec) == (budget_pb2.GRANT_SOURCE_MANAGER, "int4")
    assert read_grant(message) == granted


def packed_grant():
    shape = ModelShape(2, 3, 8, 4, layer_windows=(16, 0))
    return grant(BudgetRequest.tokens(100), PolicyRequest("h2o"), shape, 5000, codec="turboquant:3")


def test_resident_formats_round_trip():
    granted = packed_grant()
    assert granted.codecs == ("none", "turboquant:k3v3")
    mixed = replace(granted, by_head=True, layer_slots=(4,) * 6, codecs=("none", "int4", "int8") * 2)
    for each in (granted, mixed):
        assert read_grant(grant_message(each, budget_pb2.GRANT_SOURCE_MANAGER, "int4")) == each
    message = grant_message(mixed, budget_pb2.GRANT_SOURCE_MANAGER, "int4")
    assert list(message.resident_codecs) == ["none", "int4", "int8"]


@pytest.mark.parametrize(
    ("names", "indices", "field", "words"),
    [
        (["int3"], [0, 0], "resident_codecs", "unknown codec"),
        (["kivi"], [0, 0], "resident_codecs", "cannot be resident"),
        (["turboquant:3"], [0, 0], "resident_codecs", "must be full names: turboquant:k3v3"),
        (["int4", "int4"], [0, 1], "resident_codecs", "must be different names"),
        (["none", "int4", "int8"], [0, 1], "resident_codecs", "no more than"),
        (["int4"], [0], "resident_codec_indices", "must be 2 numbers"),
        (["int4"], [], "resident_codec_indices", "must be 2 numbers"),
        ([], [0, 0], "resident_codec_indices", "none without names"),
        (["int4"], [0, 1], "resident_codec_indices", "must be below 1"),
    ],
)
def test_bad_resident_formats_are_refused(names, indices, field, words):
    message = grant_message(packed_grant(), budget_pb2.GRANT_SOURCE_MANAGER, "int4")
    message.resident_codecs[:] = names
    message.resident_codec_indices[:] = indices
    with pytest.raises(InvalidRequestError, match=words) as caught:
        read_grant(message)
    assert caught.value.field == f"session.grant.{field}"


@pytest.mark.parametrize("bits", [(), tuple(((0.5,) * 13,) * 3 for _ in range(2))], ids=["none", "measured"])
def test_profiles_round_trip(bits):
    own = Profile("m", (0.2, 0.5), tuple(((0.3, 0.1),) * 3 for _ in range(2)), bits)
    message = profile_message(own)
    shape = model_shape(SPEC.model)
    assert read_profile(message, shape) == own
    message.bits.append(0.5)
    with pytest.raises(InvalidRequestError, match="must be 2 x 3 x 13 numbers, or none") as caught:
        read_profile(message, shape)
    assert caught.value.field == "profile.bits"


def test_a_protected_policy_and_its_tail_round_trip():
    request = policy_request(budget_pb2.Policy(name="protected:scissorhands:paper", parameters={"tail": 5}))
    assert request == PolicyRequest("protected", "scissorhands:paper", {"tail": 5})
    granted = grant(BudgetRequest.tokens(100), request, ModelShape(2, 3, 8, 4))
    assert granted.parameters.tail == 5
    assert read_grant(grant_message(granted, budget_pb2.GRANT_SOURCE_MANAGER, "")) == granted


def test_a_shape_tells_how_many_query_heads_share_a_key():
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 3, "element_bytes": 4}
    assert model_shape(model_pb2.ModelInfo(**sizes, query_heads=6)).group == 3
    assert model_shape(model_pb2.ModelInfo(**sizes)).group == 1


def test_windows_are_of_all_layers_or_none():
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 3, "element_bytes": 4}
    assert model_shape(model_pb2.ModelInfo(**sizes, layer_windows=[0, 8])).layer_windows == (0, 8)
    assert model_shape(model_pb2.ModelInfo(**sizes, layer_windows=[0, 0])) == model_shape(model_pb2.ModelInfo(**sizes))
    with pytest.raises(InvalidRequestError, match=r"session\.model\.layer_windows: must be 2 numbers or none"):
        model_shape(model_pb2.ModelInfo(**sizes, layer_windows=[8]))


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "element_bytes"])
def test_a_missing_size_is_named(name):
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 3, "element_bytes": 4}
    assert model_shape(model_pb2.ModelInfo(**sizes)) == ModelShape(1, 2, 3, 4)
    with pytest.raises(InvalidRequestError) as caught:
        model_shape(model_pb2.ModelInfo(**{**sizes, name: 0}))
    assert caught.value.field == f"session.model.{name}"


def test_a_sliding_layer_travels_without_slots():
    empty = LayerEvidence(positions=np.zeros((3, 0), dtype=np.int32), signals={})
    snapshot = replace(make_snapshot(), layers=(empty, make_snapshot().layers[1]))
    header, layers, heads = parts(snapshot)
    assert list(header.layer_lengths) == [0, 9]
    read = read_snapshot(header, layers, heads)
    assert (read.layers[0].positions.shape, read.layers[0].signals) == ((3, 0), {})
    keep = (np.ones((3, 0), dtype=np.bool_), np.ones((3, 9), dtype=np.bool_))
    message = plan_message(Plan(read.epoch, read.step, keep))
    assert [kept.shape for kept in read_plan(message, snapshot).keep] == [(3, 0), (3, 9)]


def test_parts_travel_together_as_far_as_a_message_goes():
    snapshot = make_snapshot(lengths=(200,) * 10)
    size = sum(part.ByteSize() for part in snapshot_parts(snapshot, SPEC))
    requests = list(plan_requests([(snapshot, SPEC)] * 16))
    assert len(requests) < 16
    assert all(request.ByteSize() < 2 << 20 for request in requests)
    assert sum(request.ByteSize() for request in requests) >= 16 * size
    headers = [part.header.step for request in requests for part in request.parts if part.HasField("header")]
    assert headers == [snapshot.step] * 16


@pytest.mark.parametrize(("part_bytes", "count"), [(1, 2), (1 << 20, 1)])
def test_snapshots_round_trip(part_bytes, count):
    snapshot = make_snapshot()
    header, layers, heads = parts(snapshot, part_bytes)
    assert len(layers) == count
    assert list(header.layer_lengths) == [5, 9]
    read = read_snapshot(header, layers, heads)
    assert (read.epoch, read.step, read.ahead, read.incoming, read.prompt) == (4, 70_000, 8, 1, 35_000)
    for ours, theirs in zip(snapshot.layers, read.layers, strict=True):
        assert np.array_equal(ours.positions, theirs.positions)
        assert ours.signals.keys() == theirs.signals.keys()
        for name, signal in ours.signals.items():
            assert np.array_equal(signal, theirs.signals[name])


@pytest.mark.parametrize(
    "policy", ["h2o", "streaming", "scissorhands", "r-kv", "fastgen", "expected-attention", "protected", "merged"]
)
def test_a_plan_is_the_same_on_both_sides(policy):
    snapshot = make_snapshot(lengths=(40, 40), largest=500)
    granted = grant(BudgetRequest.tokens(48), PolicyRequest(policy), ModelShape(2, 3, 8, 4), 1000)
    ours, theirs = plan(granted, snapshot), plan(granted, read_snapshot(*parts(snapshot)))
    for mine, other in zip(ours.keep, theirs.keep, strict=True):
        assert (~mine).sum() > 0
        assert np.array_equal(mine, other)


def test_layers_out_of_order_missing_or_too_many_are_refused():
    header, layers, heads = parts(make_snapshot())
    for wrong in (layers[::-1], layers[:1], [*layers, layers[0]], []):
        with pytest.raises(InvalidRequestError) as caught:
            read_snapshot(header, wrong, heads)
        assert caught.value.field.startswith("evidence")


@pytest.mark.parametrize("change", [b"", b"\0"])
def test_an_array_of_the_wrong_size_is_refused(change):
    header, layers, heads = parts(make_snapshot())
    array = layers[1].signals["mass"]
    array.data = array.data[:-4] + change
    with pytest.raises(InvalidRequestError) as caught:
        read_snapshot(header, layers, heads)
    assert caught.value.field == "evidence.signals.mass.data"


@pytest.mark.parametrize("number", [plan_pb2.NUMBER_TYPE_UNSPECIFIED, 17])
def test_an_array_without_a_known_type_is_refused(number):
    header, layers, heads = parts(make_snapshot())
    layers[0].positions.type = number
    with pytest.raises(InvalidRequestError) as caught:
        read_snapshot(header, layers, heads)
    assert caught.value.field == "evidence.positions.type"


def test_positions_must_be_whole_numbers():
    header, layers, heads = parts(make_snapshot())
    layers[0].positions.CopyFrom(layers[0].signals["mass"])
    with pytest.raises(InvalidRequestError) as caught:
        read_snapshot(header, layers, heads)
    assert caught.value.field == "evidence.positions.type"


@settings(deadline=None, derandomize=True)
@given(length=st.integers(1, 40), heads=st.integers(1, 4), seed=st.integers(0, 100))
def test_plans_round_trip(length, heads, seed):
    generator = np.random.default_rng(seed)
    row = generator.permutation(np.arange(length) < generator.integers(0, length + 1))
    keep = np.stack([generator.permutation(row) for _ in range(heads)])
    layer = LayerEvidence(np.tile(np.arange(length), (heads, 1)), {})
    snapshot = Snapshot(2, 50, 0, 1, (layer,))
    message = plan_message(Plan(2, 50, (keep,)))
    assert len(message.layers[0].keep) == heads * ((length + 7) // 8)
    assert np.array_equal(read_plan(message, snapshot).keep[0], keep)


def test_the_lowest_bit_comes_first():
    keep = np.zeros((1, 10), dtype=np.bool_)
    keep[0, [0, 9]] = True
    assert plan_message(Plan(0, 0, (keep,))).layers[0].keep == b"\x01\x02"


@pytest.mark.parametrize(("name", "value"), [("epoch", 3), ("step", 49)])
def test_a_plan_of_another_snapshot_is_refused(name, value):
    layer = LayerEvidence(np.arange(8).reshape(1, 8), {})
    message = plan_message(Plan(2, 50, (np.ones((1, 8), dtype=np.bool_),)))
    setattr(message, name, value)
    with pytest.raises(InvalidRequestError, match="another snapshot"):
        read_plan(message, Snapshot(2, 50, 0, 1, (layer,)))


def test_a_plan_of_the_wrong_size_is_refused():
    layer = LayerEvidence(np.arange(16).reshape(2, 8), {})
    snapshot = Snapshot(2, 50, 0, 1, (layer,))
    message = plan_message(Plan(2, 50, (np.ones((2, 8), dtype=np.bool_),)))
    message.layers[0].keep += b"\0"
    with pytest.raises(InvalidRequestError, match="3 bytes, not 2"):
        read_plan(message, snapshot)
    message.layers.add()
    with pytest.raises(InvalidRequestError, match="another snapshot"):
        read_plan(message, snapshot)


def test_a_plan_whose_heads_keep_differently_many_is_refused():
    layer = LayerEvidence(np.arange(16).reshape(2, 8), {})
    keep = np.ones((2, 8), dtype=np.bool_)
    keep[0, 0] = False
    with pytest.raises(InvalidRequestError, match="equally many"):
        read_plan(plan_message(Plan(2, 50, (keep,))), Snapshot(2, 50, 0, 1, (layer,)))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([0, 255]), np.uint8),
        (np.array([0, 256]), np.uint16),
        (np.array([65_535]), np.uint16),
        (np.array([65_536]), np.uint32),
        (np.array([], dtype=np.int64), np.uint8),
        (np.array([0.1], dtype=np.float64), np.float32),
        (np.array([0.1], dtype=np.float16), np.float32),
    ],
)
def test_numbers_are_packed_in_the_smallest_type(array, dtype):
    packed = pack(array)
    assert packed.dtype == dtype
    assert np.array_equal(packed, array.astype(dtype))


@pytest.mark.parametrize("array", [np.array([-1, 5]), np.array([2**32])])
def test_numbers_that_no_type_holds_are_refused(array):
    with pytest.raises(ValueError, match="0 to 4294967295"):
        pack(array)
