"""Eviction policies against examples that were worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scissorhands.budget import BudgetRequest, EvictionParameters, Grant, ModelShape, slots_to_drop
from scissorhands.errors import InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.plan import plan
from scissorhands.policies import POLICIES, get_policy, policy_names
from scissorhands.policies.base import lowest
from scissorhands.policies.scissorhands import window_start
from scissorhands.policies.snapkv import pooled
from scissorhands.snapshot import LayerEvidence, Snapshot


def granted(policy, preset="default", slots=8, layers=1, **numbers):
    defaults = {"recent": 0, "sinks": 0, "drop": 2, "lookahead": 0, "chunk": 1, "window": 0}
    return Grant(policy, preset, (slots,) * layers, EvictionParameters(**{**defaults, **numbers}), bytes=0)


def snapshot(*layers, step, ahead=0, incoming=1):
    return Snapshot(epoch=0, step=step, ahead=ahead, incoming=incoming, layers=layers)


def evidence(positions, **signals):
    """Return one layer's evidence; a flat list stands for one head."""
    rows = {name: np.atleast_2d(np.array(values)) for name, values in {"positions": positions, **signals}.items()}
    return LayerEvidence(rows.pop("positions"), rows)


def kept(result, layer=0):
    return [np.flatnonzero(row).tolist() for row in result.keep[layer]]


def test_h2o_drops_the_slots_with_the_least_mass():
    layer = evidence(range(8), mass=[5, 1, 4, 3, 0.5, 2, 9, 8])
    assert kept(plan(granted("h2o"), snapshot(layer, step=8))) == [[0, 2, 3, 5, 6, 7]]


def test_h2o_decides_for_every_head_alone():
    layer = evidence([range(8), range(8)], mass=[[5, 1, 4, 3, 0.5, 2, 9, 8], [0, 0, 4, 3, 5, 2, 9, 8]])
    assert kept(plan(granted("h2o"), snapshot(layer, step=8))) == [[0, 2, 3, 5, 6, 7], [2, 3, 4, 5, 6, 7]]


def test_ties_drop_the_older_token():
    layer = evidence(range(8), mass=[1, 1, 1, 1, 1, 1, 1, 1])
    assert kept(plan(granted("h2o", drop=3), snapshot(layer, step=8))) == [[3, 4, 5, 6, 7]]


@settings(deadline=None, derandomize=True)
@given(hnp.arrays(np.float64, (2, 30), elements=st.sampled_from([0.0, 1.0, 2.0, 2.5, np.inf])), st.integers(1, 30))
def test_the_lowest_are_the_first_of_a_stable_sort(scores, count):
    order = np.argsort(scores, axis=1, kind="stable")[:, :count]
    found = [np.flatnonzero(head).tolist() for head in lowest(scores, count)]
    assert found == np.sort(order, axis=1).tolist()


def test_a_budget_holds_for_attention_that_is_no_number():
    layer = evidence(range(8), mass=[np.nan] * 7 + [1])
    assert kept(plan(granted("h2o", drop=3), snapshot(layer, step=8))) == [[2, 3, 4, 5, 6]]


def test_sinks_are_exempt_by_position_not_by_slot():
    # Position 1 has been evicted before: the first slots now hold positions 0 and 2, and only 0 is a sink.
    layer = evidence([0, 2, 3, 4, 5, 6, 7, 8], mass=[0, 0, 1, 2, 3, 4, 5, 6])
    assert kept(plan(granted("h2o", sinks=2), snapshot(layer, step=9))) == [[0, 3, 4, 5, 6, 7]]


def test_recent_slots_are_exempt():
    layer = evidence(range(8), mass=[9, 8, 7, 6, 0, 0, 0, 0])
    assert kept(plan(granted("h2o", recent=3), snapshot(layer, step=8))) == [[0, 1, 2, 5, 6, 7]]


def test_slots_that_come_after_the_snapshot_count_as_recent():
    # r = 3, of which 2 are appended before the eviction: of the snapshot only the newest slot is exempt.
    layer = evidence(range(6), mass=[9, 8, 7, 6, 0, 0])
    result = plan(granted("h2o", recent=3, lookahead=2), snapshot(layer, step=6, ahead=2))
    assert kept(result) == [[0, 1, 2, 5]]


def test_more_slots_ahead_than_recent_leave_none_exempt():
    layer = evidence(range(6), mass=[9, 8, 7, 6, 1, 0])
    result = plan(granted("h2o", recent=1, lookahead=2), snapshot(layer, step=6, ahead=2))
    assert kept(result) == [[0, 1, 2, 3]]


def test_a_row_that_fits_keeps_everything():
    layer = evidence(range(7), mass=[0] * 7)
    assert kept(plan(granted("h2o"), snapshot(layer, step=7))) == [list(range(7))]


def test_a_chunk_drops_what_it_needs():
    layer = evidence(range(8), mass=[5, 1, 4, 3, 0.5, 2, 9, 8])
    assert kept(plan(granted("h2o", chunk=5), snapshot(layer, step=8, incoming=5))) == [[0, 6, 7]]


def test_streaming_keeps_sinks_and_the_newest():
    layer = evidence([0, 1, 5, 6, 7, 8, 9, 10], mass=[0] * 8)
    assert kept(plan(granted("streaming", sinks=2, drop=3), snapshot(layer, step=11))) == [[0, 1, 5, 6, 7]]


def test_streaming_never_looks_at_attention():
    layer = evidence(range(8), mass=[9, 9, 9, 9, 0, 0, 0, 0])
    assert kept(plan(granted("streaming", drop=4), snapshot(layer, step=8))) == [[4, 5, 6, 7]]


def test_full_refuses_to_evict():
    layer = evidence(range(8), mass=[0] * 8)
    with pytest.raises(InvalidRequestError, match="keeps every token"):
        plan(granted("full"), snapshot(layer, step=8))
    assert kept(plan(granted("full", slots=9), snapshot(layer, step=8))) == [list(range(8))]


def test_tova_drops_what_the_newest_query_attends_to_least():
    # Mass, the attention of all queries, would keep slots 0 and 1.
    layer = evidence(
        range(8), mass=[9, 8, 1, 1, 1, 1, 1, 1], last_attention=[0.01, 0.02, 0.3, 0.1, 0.2, 0.1, 0.07, 0.2]
    )
    assert kept(plan(granted("tova"), snapshot(layer, step=8))) == [[2, 3, 4, 5, 6, 7]]


def test_tova_exempts_no_recent_slot_and_decides_for_every_head_alone():
    last = [[0.1, 0.2, 0.1, 0.2, 0.2, 0.1, 0.06, 0.04], [0.1, 0.02, 0.3, 0.03, 0.2, 0.1, 0.15, 0.1]]
    layer = evidence([range(8), range(8)], mass=np.ones((2, 8)), last_attention=last)
    recent = get_policy("tova").parameters(64).recent
    result = plan(granted("tova", recent=recent), snapshot(layer, step=8))
    assert kept(result) == [[0, 1, 2, 3, 4, 5], [0, 2, 4, 5, 6, 7]]


def test_snapkv_drops_by_the_mass_of_the_window_alone():
    layer = evidence(range(8), mass=[9, 9, 9, 9, 9, 1, 1, 1], window_mass=[0.1, 0, 0, 0, 0.2, 0, 0, 0])
    # Slot 0 is three away from slot 3, and slot 4 reaches slots 1 to 7: only slot 0 has no more than 0.1.
    assert kept(plan(granted("snapkv", drop=1), snapshot(layer, step=8))) == [[1, 2, 3, 4, 5, 6, 7]]


def test_snapkv_keeps_three_neighbors_on_either_side_and_no_more():
    window = np.zeros(16)
    window[[5, 12]] = 2, 1
    layer = evidence(range(16), mass=np.ones(16), window_mass=window)
    # Slots 2 to 8 share the 2, slots 9 to 15 the 1; 0 and 1 have nothing, and then the older of the 1 go.
    scores = pooled(window[None])[0].tolist()
    assert scores == [0] * 2 + [2] * 7 + [1] * 7
    result = plan(granted("snapkv", slots=16, drop=4), snapshot(layer, step=16))
    assert kept(result) == [[2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15]]


def test_snapkv_pools_over_slots_that_are_left_whatever_their_positions():
    positions = [0, 10, 20, 30, 40, 50, 60, 70]
    layer = evidence(positions, mass=np.ones(8), window_mass=[0, 0, 0, 0, 0, 0, 3, 0])
    assert kept(plan(granted("snapkv", drop=3), snapshot(layer, step=71))) == [[3, 4, 5, 6, 7]]


def test_snapkv_does_not_pool_across_heads():
    layer = evidence([range(8), range(8)], mass=np.ones((2, 8)), window_mass=[[1, *[0] * 7], [*[0] * 7, 1]])
    result = plan(granted("snapkv", drop=4), snapshot(layer, step=8))
    assert kept(result) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_snapkv_keeps_its_window_of_recent_slots_as_far_as_the_budget_allows():
    numbers = get_policy("snapkv").parameters(200)
    assert numbers == EvictionParameters(recent=32, sinks=4, drop=16, lookahead=8, chunk=50, window=32)
    assert get_policy("snapkv").parameters(40).recent == 20


def test_paper_drops_the_largest_low_counts_as_they_are():
    low = [3, 9, 1, 9, 0, 8, 2, 7]
    layer = evidence(range(8), mass=[0] * 8, low_count_ring=low)
    # Slots 1 and 3 have 9; the next largest is slot 5 with 8.
    result = plan(granted("scissorhands", "paper", drop=3, window=400), snapshot(layer, step=8))
    assert kept(result) == [[0, 2, 4, 6, 7]]


def test_paper_does_not_ask_how_often_a_token_was_seen():
    # The young slot 7 was below average at 1 of 1 queries, the old slot 0 at 2 of 8: the paper's rule drops slot 0.
    layer = evidence(range(8), mass=[0] * 8, low_count_ring=[2, 0, 0, 0, 0, 0, 0, 1])
    result = plan(granted("scissorhands", "paper", drop=1, window=400), snapshot(layer, step=8))
    assert kept(result) == [[1, 2, 3, 4, 5, 6, 7]]


def test_paper_breaks_ties_by_age_and_exempts_the_recent_window():
    layer = evidence(range(8), mass=[0] * 8, low_count_ring=[5, 5, 5, 5, 5, 9, 9, 9])
    result = plan(granted("scissorhands", "paper", drop=4, recent=3, window=400), snapshot(layer, step=8))
    assert kept(result) == [[4, 5, 6, 7]]


@pytest.mark.parametrize(("slots", "drop", "chunk"), [(400, 200, 190), (100, 50, 40), (21, 10, 1), (7, 3, 1)])
def test_paper_has_the_numbers_of_the_paper(slots, drop, chunk):
    assert get_policy("scissorhands", "paper").parameters(slots) == EvictionParameters(
        recent=10, sinks=0, drop=drop, lookahead=0, chunk=chunk, window=400
    )


@pytest.mark.parametrize("preset", ["default", "uniform"])
def test_default_drops_the_smallest_mean_attention(preset):
    # Attention 4 of 8 queries, 1 of 4, 0.5 of 1 and 0.4 of 2: means 0.5, 0.25, 0.5 and 0.2.
    layer = evidence([0, 4, 7, 6], mass=[4, 1, 0.5, 0.4])
    result = plan(granted("scissorhands", preset, slots=4, drop=2), snapshot(layer, step=8))
    assert kept(result) == [[0, 2]]


def test_counts_drop_the_largest_low_count_per_query_observed():
    # Low counts 4 of 8 queries, 3 of 4, 1 of 1 and 0 of 2: shares 0.5, 0.75, 1 and 0.
    layer = evidence([0, 4, 7, 6], mass=[0] * 4, low_count=[4, 3, 1, 0])
    result = plan(granted("scissorhands", "counts", slots=4, drop=2, window=256), snapshot(layer, step=8))
    assert kept(result) == [[0, 3]]


def test_counts_are_of_queries_inside_the_window():
    # w = 8: two buckets of 4. At step 18 the last query is 17, its bucket began at 16 and the one before at 12, so
    # tokens before 12 were observed at 6 queries, and the token at 15 at 3.
    assert window_start(18, 8) == 12
    layer = evidence([0, 5, 12, 15], mass=[0] * 4, low_count=[3, 4, 5, 2])
    # Shares 3/6, 4/6, 5/6 and 2/3: slots 1 and 3 tie, and the older goes.
    result = plan(granted("scissorhands", "counts", slots=4, drop=2, window=8), snapshot(layer, step=18))
    assert kept(result) == [[0, 3]]


@pytest.mark.parametrize(
    ("step", "start"), [(1, 0), (4, 0), (5, 0), (8, 0), (9, 4), (12, 4), (13, 8), (16, 8), (17, 12)]
)
def test_two_rotating_buckets_of_four(step, start):
    assert window_start(step, 8) == start


def test_default_exempts_sinks_and_three_tenths_recent():
    numbers = get_policy("scissorhands").parameters(200)
    assert numbers == EvictionParameters(recent=60, sinks=4, drop=16, lookahead=8, chunk=50, window=0)
    assert get_policy("h2o").parameters(200).recent == 100
    assert get_policy("streaming").parameters(200).recent == 0


def test_layers_are_decided_from_their_own_evidence():
    first = evidence(range(8), mass=[5, 1, 4, 3, 0.5, 2, 9, 8])
    second = evidence([1, 2, 4, 5, 6, 7], mass=[0, 1, 2, 3, 4, 5])
    budgets = Grant("h2o", "default", (8, 6), EvictionParameters(0, 0, 2, 0, 1, 0), bytes=0)
    result = plan(budgets, snapshot(first, second, step=8))
    assert kept(result, 0) == [[0, 2, 3, 5, 6, 7]]
    assert kept(result, 1) == [[2, 3, 4, 5]]


def test_a_layer_with_room_for_another_round_keeps_everything():
    first = evidence(range(8), mass=range(8))
    second = evidence(range(4), mass=range(4))
    budgets = Grant("h2o", "default", (8, 8), EvictionParameters(0, 0, 2, 0, 1, 0), bytes=0)
    result = plan(budgets, snapshot(first, second, step=8))
    assert kept(result, 0) == [[2, 3, 4, 5, 6, 7]]
    assert kept(result, 1) == [[0, 1, 2, 3]]


def test_a_plan_answers_its_snapshot_and_leaves_it_alone():
    layer = evidence(range(8), mass=[5, 1, 4, 3, 0.5, 2, 9, 8])
    before = layer.signals["mass"].copy()
    result = plan(granted("h2o", sinks=2, recent=2), Snapshot(7, 8, 0, 1, (layer,)))
    assert (result.epoch, result.step) == (7, 8)
    assert np.array_equal(layer.signals["mass"], before)


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "full"])
def test_sinks_and_recent_always_survive(name):
    policy, _, preset = name.partition(":")
    shape = ModelShape(layers=2, kv_heads=3, head_dim=4, element_bytes=4)
    rights = grant(BudgetRequest.tokens(64), PolicyRequest(policy, preset), shape, 1000)
    numbers = rights.parameters
    generator = np.random.default_rng(1)
    ahead = numbers.lookahead
    length = 64 - ahead
    step = 300
    positions = np.stack(
        [np.r_[0:4, np.sort(generator.choice(np.arange(4, step), length - 4, replace=False))] for _ in range(3)]
    )
    signals = {
        "mass": generator.random((3, length)),
        "low_count": generator.integers(0, 100, (3, length)),
        "low_count_ring": generator.integers(0, 400, (3, length)),
        "last_attention": generator.random((3, length)),
        "window_mass": generator.random((3, length)),
        "token_kind": generator.integers(0, 3, (3, length)),
        "expected_attention": generator.random((3, length)),
        "redundancy": generator.random((3, length)),
        "weight": generator.random((3, length)),
    }
    layer = LayerEvidence(positions, signals)
    prompt = 200
    result = plan(rights, Snapshot(3, step, ahead, 1, (layer, layer), prompt))
    for keep in result.keep:
        assert (~keep).sum(axis=1).tolist() == [numbers.drop] * 3
        assert keep[positions < numbers.sinks].all()
        assert keep[(positions >= prompt - numbers.tail) & (positions < prompt)].all()
        exempt = max(0, numbers.recent - ahead)
        assert keep[:, length - exempt :].all()


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "full"])
def test_all_layers_at_once_are_decided_like_each_alone(name):
    policy, _, preset = name.partition(":")
    decider = get_policy(policy, preset)
    # Budgets of two sizes in turn, and a layer with a window of its own in between.
    budgets = (64, 48, 64, 16, 48, 64)
    lengths = [0 if slots == 16 else slots - 4 for slots in budgets]
    numbers = EvictionParameters(recent=8, sinks=4, drop=9, lookahead=4, chunk=8, window=32)
    generator = np.random.default_rng(2)
    layers = []
    for heads, length in zip((3, 1, 2, 3, 2, 3), lengths, strict=True):
        positions = np.sort(np.stack([generator.permutation(300)[:length] for _ in range(heads)]), axis=1)
        # Attention of few values, so that ties are many.
        shares = generator.integers(0, 6, (heads, length)).astype(np.float32)
        floats = ("mass", "last_attention", "window_mass", "expected_attention", "redundancy", "weight")
        signals = dict.fromkeys(floats, shares / 7)
        signals["low_count"] = signals["low_count_ring"] = generator.integers(0, 9, (heads, length), dtype=np.uint8)
        signals["token_kind"] = generator.integers(0, 3, (heads, length), dtype=np.uint8)
        layers.append(LayerEvidence(positions, signals if length else {}))
    whole = Snapshot(0, 300, 4, 1, tuple(layers), prompt=200)
    drops = slots_to_drop(lengths, budgets, numbers, 1, 4)
    assert min(drop for drop, length in zip(drops, lengths, strict=True) if length) > 0
    made = decider.plan(numbers, budgets, whole)
    for keep, layer, drop, slots in zip(made.keep, layers, drops, budgets, strict=True):
        assert np.array_equal(keep, decider.keep(layer, drop, numbers.within(slots), whole))


def test_policy_names_are_what_get_policy_takes():
    names = policy_names()
    presets = ["scissorhands", "scissorhands:uniform", "scissorhands:counts", "scissorhands:paper"]
    alone = [
        *presets,
        *("h2o", "tova", "snapkv", "r-kv", "fastgen", "expected-attention", "streaming", "full"),
    ]
    wrapped = [name for name in alone if name != "full"]
    assert names == [*alone, *(f"{wrapper}:{name}" for wrapper in ("protected", "merged") for name in wrapped)]
    assert set(POLICIES) == {name.partition(":")[0] for name in names}
    for name in names:
        policy, _, preset = name.partition(":")
        assert get_policy(policy, preset).preset == (preset or "default")
    assert get_policy("protected").preset == "scissorhands"


@pytest.mark.parametrize(("name", "preset", "field"), [("lru", "", "policy.name"), ("h2o", "x", "policy.preset")])
def test_unknown_policies_are_refused(name, preset, field):
    with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
        get_policy(name, preset)
    assert caught.value.field == field
