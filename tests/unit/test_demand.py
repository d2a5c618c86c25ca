"""What the heads of a model need, measured from snapshots, against examples that were worked by hand."""

import numpy as np
import pytest

from scissorhands.budget import ModelShape
from scissorhands.demand import Demands, surprise
from scissorhands.importance import Attention
from scissorhands.profile import share_out

SHAPE = ModelShape(layers=1, kv_heads=2, head_dim=8, element_bytes=4)
# Attention per query of the older four slots: 0.5, 0.1, 0.05, 0.2; the middle two are the lower half of them.
MASS = np.array([2.5, 0.4, 0.15, 0.4, 0.5], dtype=np.float32)


def remembered(step, *heads, by_head=False):
    """Return what is remembered of a snapshot with the given heads, each positions and mass."""
    arrays = [(np.array(positions), np.array(mass, dtype=np.float32)) for positions, mass in heads]
    if by_head:
        return Attention(step, tuple(p[None] for p, _ in arrays), tuple(m[None] for _, m in arrays))
    return Attention(step, (np.stack([p for p, _ in arrays]),), (np.stack([m for _, m in arrays]),))


def after(*received):
    """Return the snapshot four queries after ``MASS``, in which the five slots of each head received something more."""
    heads = [([*range(9)], [*(MASS + more), 0.1, 0.1, 0.1, 0.1]) for more in received]
    return remembered(9, *heads)


def test_sharp_attention_to_what_mattered_little_counts():
    before = remembered(5, *[(range(5), MASS)] * 2)
    sharp, spread = [2.0, 1.6, 0, 0, 0], [2.0, 0.4, 0.4, 0.8, 0.4]
    assert surprise(before, after(sharp, spread)) == pytest.approx([0.4**2, 0.1**2], rel=1e-5)


def test_slots_of_one_snapshot_only_do_not_count():
    before = remembered(5, *[(range(5), MASS)] * 2)
    # Slot 1 was evicted: of the older three of the four left, the lower half is slot 2.
    later = remembered(9, *[([0, 2, 3, 4, 5], [*(MASS[[0, 2, 3, 4]] + [2.0, 0.4, 0.8, 0.8]), 1.0])] * 2)
    assert surprise(before, later) == pytest.approx([0.1**2] * 2, rel=1e-5)


def test_heads_of_other_sizes_are_scaled():
    twice = np.concatenate([MASS, MASS])
    more = np.array([0, 0, 0.4, 0, 0])
    before = remembered(12, (range(5), MASS), (range(10), twice), by_head=True)
    later = remembered(16, (range(5), MASS + more), (range(10), np.concatenate([MASS + more, MASS])), by_head=True)
    # The same attention came to the slot of the least mass; 5 and 10 slots are 2/3 and 4/3 of the mean.
    assert surprise(before, later) == pytest.approx([0.1**2 * 2 / 3, 0.1**2 * 4 / 3], rel=1e-5)


def test_nothing_is_learned_from_too_little():
    one = remembered(5, ([0], [1.0]))
    assert surprise(one, remembered(9, ([0], [2.0]))) is None
    before = remembered(5, (range(5), MASS))
    assert surprise(before, before) is None
    assert surprise(before, remembered(5 + 32, (range(5), MASS))) is not None
    assert surprise(before, remembered(5 + 33, (range(5), MASS))) is None
    assert surprise(Attention(5, (), ()), Attention(9, (), ())) is None


def test_a_head_that_is_surprised_gets_more_slots():
    demands = Demands(renewal=2)
    demands.learn("f", "tiny", SHAPE, np.array([6e-3, 1e-3]))
    assert demands.find("f", SHAPE).profile is None
    demands.learn("f", "tiny", SHAPE, np.array([2e-3, 1e-3]))
    profile = demands.find("f", SHAPE).profile
    # Means of 4e-3 and 1e-3 are losses as 4 to 1, of mean 1 at half of the length, and four times that at a fifth.
    place = profile.shares.index(0.2)
    assert [head[place] for head in profile.losses[0]] == pytest.approx([6.4, 1.6])
    needy, other = share_out(profile, (0, 1), 200, 20, 1000)
    assert needy > 200 > other >= 100
    assert needy + other <= 400


def test_a_profile_stays_until_it_is_renewed():
    demands = Demands(renewal=2)
    for _ in range(2):
        demands.learn("f", "tiny", SHAPE, np.array([8e-3, 1e-3]))
    first = demands.find("f", SHAPE).profile
    demands.learn("f", "tiny", SHAPE, np.array([1e-3, 8e-3]))
    assert demands.find("f", SHAPE).profile is first
    demands.learn("f", "tiny", SHAPE, np.array([1e-3, 8e-3]))
    assert demands.find("f", SHAPE).profile.losses[0][0] == pytest.approx(demands.find("f", SHAPE).profile.losses[0][1])


def test_old_sessions_fade():
    demands = Demands(renewal=1)
    for surprises in ([1.0, 0.0], [0.0, 1.0]):
        for _ in range(3000):
            demands.learn("f", "tiny", SHAPE, np.array(surprises))
    old, new = demands.find("f", SHAPE).surprises
    assert (old < 0.06, new > 0.94) == (True, True)


def test_sliding_layers_cost_nothing():
    shape = ModelShape(layers=2, kv_heads=2, head_dim=8, element_bytes=4, layer_windows=(16, 0))
    demands = Demands(renewal=1)
    demands.learn("f", "tiny", shape, np.array([8e-3, 1e-3]))
    first, second = demands.find("f", shape).profile.losses
    assert not any(map(any, first))
    assert all(map(all, second))


def test_models_are_kept_apart_and_bounded():
    demands = Demands(renewal=1)
    for number in range(17):
        demands.learn(f"f{number}", f"m{number}", SHAPE, np.array([8e-3, 1e-3]))
    assert demands.find("f0", SHAPE) is None
    assert demands.named("f1").name == demands.named("m1").name == "m1"
    assert demands.named("").name == "m16"
    assert demands.named("m0") is None
    assert demands.find("f1", ModelShape(2, 1, 8, 4)) is None


@pytest.mark.parametrize(("model", "surprises"), [("", [1.0, 1.0]), ("f", [1.0]), ("f", [1.0] * 3)])
def test_what_fits_no_model_is_left_out(model, surprises):
    demands = Demands(renewal=1)
    demands.learn(model, "tiny", SHAPE, np.array(surprises))
    assert demands.named("") is None


def test_heads_without_surprise_make_no_profile():
    demands = Demands(renewal=1)
    demands.learn("f", "tiny", SHAPE, np.zeros(2))
    assert demands.find("f", SHAPE).profile is None
