"""What snapshots tell about importance, against examples that were worked by hand."""

import numpy as np
import pytest

from scissorhands.importance import attention, persistence, recent_mass_dropped, tally
from scissorhands.snapshot import LayerEvidence, Plan, Snapshot


def row(positions, mass, epoch=0, step=8):
    layer = LayerEvidence(np.atleast_2d(positions), {"mass": np.atleast_2d(np.array(mass, dtype=np.float32))})
    return Snapshot(epoch, step, 0, 1, (layer,))


def keeping(snapshot, *slots):
    keep = np.zeros(snapshot.layers[0].positions.shape, dtype=np.bool_)
    keep[:, slots] = True
    return Plan(snapshot.epoch, snapshot.step, (keep,))


def test_a_first_plan_counts_what_it_drops():
    snapshot = row(range(4), [1, 2, 0.5, 0.5], step=4)
    counted = tally(snapshot, keeping(snapshot, 0, 1, 3), None)
    assert (counted.epoch, counted.step, counted.evictions) == (0, 4, 1)
    assert (counted.evicted_slots, counted.resident_slots) == (1, 3)
    assert counted.mass_dropped_share == pytest.approx(0.5 / 4)


def test_the_next_plan_adds_to_it():
    first = row(range(4), [1, 2, 0.5, 0.5], step=4)
    before = tally(first, keeping(first, 0, 1, 3), None)
    second = row([0, 1, 3, 4], [1.5, 3, 0.75, 0.25], epoch=1, step=6)
    counted = tally(second, keeping(second, 0, 1), before)
    assert counted.evictions == 2
    assert counted.evicted_slots == 6 - 4 + 2
    assert counted.resident_slots == 2
    # 0.5 before and 1 now, of the 5.5 that is resident and the 0.5 that was.
    assert counted.mass_dropped_share == pytest.approx(1.5 / 6)


def test_a_manager_that_missed_plans_infers_their_mass_from_the_snapshot():
    snapshot = row([0, 1, 5, 7], [3, 2, 0.5, 0.5], epoch=3, step=8)
    for before in (None, tally(row(range(4), [1] * 4, step=4), keeping(row(range(4), [1] * 4), 0, 1), None)):
        counted = tally(snapshot, keeping(snapshot, 0, 1, 3), before)
        assert counted.evictions == 4
        assert counted.evicted_slots == 4 + 1
        # Eight queries gave a mass of eight, six are still resident.
        assert counted.mass_dropped_share == pytest.approx((2 + 0.5) / 8)


def test_a_plan_that_drops_nothing_is_no_eviction():
    snapshot = row(range(4), [1, 1, 1, 1], step=4)
    counted = tally(snapshot, keeping(snapshot, 0, 1, 2, 3), None)
    assert (counted.evictions, counted.evicted_slots, counted.mass_dropped_share) == (0, 0, 0)


def test_what_went_lately_to_dropped_slots_is_a_share_of_the_latest_attention():
    before = attention(row(range(4), [4, 1, 2, 1], step=8))
    # Ten queries since: slot 1 got 0.5 of their attention, position 9 (new since) 1.5, position 2 was evicted.
    snapshot = row([0, 1, 3, 9], [10, 1.5, 3, 1.5], epoch=1, step=18)
    assert recent_mass_dropped(snapshot, keeping(snapshot, 0, 2), before) == pytest.approx((0.5 + 1.5) / 10)
    assert recent_mass_dropped(snapshot, keeping(snapshot, 0, 1, 2, 3), before) == 0


def test_before_the_first_eviction_all_attention_is_recent():
    snapshot = row(range(4), [2, 1, 0.5, 0.5], step=4)
    assert recent_mass_dropped(snapshot, keeping(snapshot, 0, 1, 3), None) == pytest.approx(0.5 / 4)


def test_recent_attention_is_matched_within_each_head_and_over_layers():
    def layer(positions, *mass):
        return LayerEvidence(np.array(positions), {"mass": np.array(mass, dtype=np.float32)})

    before = attention(Snapshot(0, 4, 0, 1, (layer([[0, 1], [0, 3]], [3, 1], [2, 2]), layer([[0, 1]], [3, 1]))))
    after = Snapshot(1, 8, 0, 1, (layer([[0, 1], [0, 3]], [5, 2], [2, 4]), layer([[1, 5]], [2, 3])))
    plan = Plan(1, 8, (np.array([[True, False], [True, False]]), np.array([[False, True]])))
    # 1 and 2 in the heads of the first layer and 1 in the second, of four queries in three heads.
    assert recent_mass_dropped(after, plan, before) == pytest.approx((1 + 2 + 1) / 12)


def test_a_layer_without_slots_changes_nothing():
    def with_sliding(snapshot, plan):
        sliding = LayerEvidence(np.zeros((1, 0), dtype=np.int32), {})
        nothing = np.zeros((1, 0), dtype=np.bool_)
        wider = Snapshot(snapshot.epoch, snapshot.step, 0, 1, (sliding, *snapshot.layers))
        return wider, Plan(plan.epoch, plan.step, (nothing, *plan.keep))

    first, second = row(range(4), [4, 1, 2, 1], step=8), row([0, 1, 3, 9], [10, 1.5, 3, 1.5], epoch=1, step=18)
    plan = keeping(second, 0, 2)
    wide_first, _ = with_sliding(first, keeping(first, 0))
    wide_second, wide_plan = with_sliding(second, plan)
    assert tally(wide_second, wide_plan, None) == tally(second, plan, None)
    before, wide_before = attention(first), attention(wide_first)
    assert recent_mass_dropped(wide_second, wide_plan, wide_before) == recent_mass_dropped(second, plan, before)
    assert persistence(wide_before, attention(wide_second)) == persistence(before, attention(second)) != ()


def test_perfect_persistence_is_one():
    before = attention(row(range(4), [4, 3, 2, 1]))
    after = attention(row(range(5), [8, 6, 2.5, 1.5, 1]))
    assert persistence(before, after) == (1.0,)


def test_the_opposite_of_persistence_is_zero():
    before = attention(row(range(4), [4, 3, 2, 1]))
    after = attention(row(range(4), [4.1, 3.1, 9, 9]))
    assert persistence(before, after) == (0.0,)


def test_it_is_what_was_received_since_that_counts_not_the_sum():
    # By sums slots 0 and 1 lead in both; but since then slots 1 and 2 received the most.
    before = attention(row(range(4), [40, 30, 2, 1]))
    after = attention(row(range(4), [40, 35, 12, 1]))
    assert persistence(before, after) == (0.5,)


def test_slots_are_matched_by_position():
    before = attention(row([0, 1, 2, 3, 4], [4, 9, 3, 2, 1]))
    # Position 1 was evicted and 9 is new; of the rest, 0 and 2 led and still lead.
    after = attention(row([0, 2, 3, 4, 9], [8, 7, 2, 1, 5]))
    assert persistence(before, after) == (1.0,)


def test_heads_are_averaged_and_layers_are_not():
    def layer(*mass):
        return LayerEvidence(np.tile(np.arange(4), (2, 1)), {"mass": np.array(mass, dtype=np.float32)})

    before = Snapshot(0, 8, 0, 1, (layer([4, 3, 2, 1], [4, 3, 2, 1]), layer([4, 3, 2, 1], [1, 2, 3, 4])))
    after = Snapshot(1, 9, 0, 1, (layer([8, 6, 2, 1], [4, 3, 9, 9]), layer([8, 6, 2, 1], [1, 2, 9, 9])))
    assert persistence(attention(before), attention(after)) == (0.5, 1.0)


@pytest.mark.parametrize("positions", [[7, 8, 9, 10], [3, 8, 9, 10]])
def test_too_few_slots_in_common_say_nothing(positions):
    before = attention(row(range(4), [4, 3, 2, 1]))
    assert persistence(before, attention(row(positions, [1, 2, 3, 4]))) == ()


def test_what_is_remembered_is_small():
    remembered = attention(row(range(1000, 1008), range(8), step=2000))
    assert remembered.size_bytes == 8 * (2 + 4)
