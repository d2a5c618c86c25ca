"""FastGen, R-KV, Expected Attention and the protection of boundaries, against examples that were worked by hand."""

import math

import numpy as np
import pytest

from scissorhands.budget import BudgetRequest, EvictionParameters, Grant, ModelShape
from scissorhands.errors import BudgetTooSmallError, InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.plan import plan
from scissorhands.policies import get_policy, policy_names
from scissorhands.policies.fastgen import cheapest, profiles
from scissorhands.snapshot import LayerEvidence, Snapshot

OTHER, PUNCTUATION, SPECIAL = range(3)


def granted(name, preset="default", **numbers):
    defaults = {"recent": 0, "sinks": 0, "drop": 2, "lookahead": 0, "chunk": 1, "window": 0}
    return Grant(name, preset, (10,), EvictionParameters(**{**defaults, **numbers}), bytes=0)


def kept(rights, step=10, prompt=0, positions=range(10), ahead=0, **signals):
    """Return the slots that are kept of ten; a flat list stands for one head."""
    arrays = {name: np.atleast_2d(np.array(values)) for name, values in {"positions": positions, **signals}.items()}
    layer = LayerEvidence(arrays.pop("positions"), arrays)
    keep = plan(rights, Snapshot(0, step, ahead, 1, (layer,), prompt)).keep[0]
    found = [np.flatnonzero(row).tolist() for row in keep]
    return found[0] if len(found) == 1 else found


def test_fastgen_profiles_each_hold_the_one_before():
    kinds = np.array([[SPECIAL, 0, 0, PUNCTUATION, 0, 0, 0, 0, 0, 0]])
    mass = np.array([[1, 9, 2, 3, 8, 7, 4, 1, 1, 2]])
    found = [np.flatnonzero(profile[0]).tolist() for profile in profiles(mass, kinds)]
    # Three of ten are frequent (1, 4, 5), and three local (7, 8, 9).
    assert found == [[0], [0, 3], [0, 1, 3, 4, 5], [0, 1, 3, 4, 5, 7, 8, 9], list(range(10))]


@pytest.mark.parametrize(
    ("mass", "profile"),
    [
        ([95, 1, 1, 0, 0, 0, 0, 0, 1, 2], 0),  # The special token alone has 95 of 100.
        ([94, 0, 0, 1, 1, 1, 1, 1, 1, 0], 1),  # With the punctuation 95.
        ([20, 1, 1, 15, 20, 20, 21, 1, 0, 1], 2),  # With the most frequent (4, 5 and 6) 96.
        ([14, 1, 1, 15, 19, 19, 19, 4, 4, 4], 3),  # Those make 86; with the newest three 98.
        ([10, 10, 10, 10, 10, 10, 10, 10, 10, 10], 4),
    ],
)
def test_fastgen_takes_the_cheapest_profile_that_recovers(mass, profile):
    kinds = np.array([[SPECIAL, 0, 0, PUNCTUATION, 0, 0, 0, 0, 0, 0]])
    weights = np.array([mass], dtype=float)
    candidates = profiles(weights, kinds)
    assert weights.sum() == 100
    assert cheapest(candidates, weights)[0].tolist() == candidates[profile][0].tolist()


def test_fastgen_keeps_the_profile_and_fills_up_by_frequency():
    kinds = [SPECIAL, 0, 0, PUNCTUATION, PUNCTUATION, 0, 0, 0, 0, 0]
    # The special token and the punctuation (0, 3, 4) hold 96 of 100; slot 4 has less than any other, and stays.
    mass = [90, 0.9, 0.8, 5.9, 0.1, 0.7, 0.6, 0.5, 0.3, 0.2]
    assert kept(granted("fastgen", drop=4), mass=mass, token_kind=kinds) == [0, 1, 2, 3, 4, 5]


def test_fastgen_lets_the_least_frequent_of_a_profile_go_when_it_is_too_large():
    kinds = [SPECIAL] * 6 + [OTHER] * 4
    mass = [10, 30, 20, 15, 12, 13, 0, 0, 0, 0]
    assert kept(granted("fastgen", drop=6), mass=mass, token_kind=kinds) == [1, 2, 3, 5]


def test_fastgen_chooses_for_every_head_alone():
    kinds = [[SPECIAL] + [OTHER] * 9] * 2
    special = [97, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    even = [4, 9, 11, 10, 11, 11, 11, 11, 11, 11]
    # The first head is left with its special token and its most frequent; the second needs all, and drops by mass.
    both = kept(granted("fastgen", drop=6), positions=[range(10)] * 2, mass=[special, even], token_kind=kinds)
    assert both == [[0, 7, 8, 9], [6, 7, 8, 9]]


def test_r_kv_weighs_importance_against_redundancy():
    # Ten queries in the window (two buckets of eight, the first of them over): importance is mass / 10, and each slot
    # has the largest of the seven around. Slot 0 is as attended to as its neighbors, so only redundancy decides.
    window = [10, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    similar = [0, math.log(9), 0, 0, 0, 0, 0, 0, 0, math.log(9)]
    # Redundancy: 9/26 for slots 1 and 9, 1/26 for the others. Scores: slots 0 to 3 have 0.1 - 0.9 R, the others -0.9 R.
    rights = granted("r-kv", drop=3, window=16)
    assert kept(rights, step=10, window_mass=window, redundancy=similar) == [0, 2, 3, 5, 6, 7, 8]


def test_r_kv_numbers():
    numbers = get_policy("r-kv").parameters(400)
    assert (numbers.recent, numbers.window, numbers.drop) == (8, 16, 16)
    assert [get_policy("r-kv").parameters(slots).drop for slots in (1024, 4096, 10_000)] == [32, 128, 128]


def test_expected_attention_drops_the_least_expected():
    expected = [5, 1, 4, 3, 0.5, 2, 9, 8, 7, 6]
    assert kept(granted("expected-attention"), mass=[1] * 10, expected_attention=expected) == [0, 2, 3, 5, 6, 7, 8, 9]


def test_every_query_head_of_a_group_takes_its_bytes():
    shape = ModelShape(layers=2, kv_heads=3, head_dim=4, element_bytes=4, group=5)
    alone = ModelShape(layers=2, kv_heads=3, head_dim=4, element_bytes=4)
    for policy in (PolicyRequest("expected-attention"), PolicyRequest("protected", "expected-attention")):
        wide, narrow = (grant(BudgetRequest.tokens(64), policy, each).bytes for each in (shape, alone))
        assert wide - narrow == 64 * 2 * 3 * 8 * 4


def test_protection_exempts_both_ends_of_the_prompt():
    rights = granted("protected", "h2o", sinks=1, tail=2, drop=3)
    # Positions 4 and 5 end the prompt; 0 and 4 and 5 would be the first to go.
    mass = [0, 5, 4, 3, 0, 0, 6, 7, 8, 9]
    assert kept(rights, prompt=6, mass=mass) == [0, 4, 5, 6, 7, 8, 9]
    assert kept(rights, prompt=0, mass=mass) == [0, 1, 2, 6, 7, 8, 9]


def test_the_end_of_the_prompt_is_known_by_position():
    # Positions 3 and 7 are left of the prompt's last five, 3 to 7; slots 3 and 4 hold them.
    positions = [0, 1, 2, 3, 7, 8, 9, 10, 11, 12]
    rights = granted("protected", "streaming", tail=5, drop=5)
    assert kept(rights, step=13, prompt=8, positions=positions, mass=[0] * 10) == [3, 4, 7, 8, 9]


def test_a_tenth_is_reserved_at_each_boundary():
    h2o, numbers = get_policy("h2o").parameters(200), get_policy("protected", "h2o").parameters(200)
    assert (numbers.sinks, numbers.tail, numbers.recent) == (20, 20, h2o.recent)
    assert numbers.smallest_budget <= 200
    assert get_policy("protected", "h2o").parameters(20).sinks == 4, "never fewer than the policy's own"


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "full"])
@pytest.mark.parametrize("slots", [64, 100, 409, 1000])
def test_numbers_are_valid_for_their_budget(name, slots):
    policy, _, preset = name.partition(":")
    numbers = get_policy(policy, preset).parameters(slots)
    assert numbers.smallest_budget <= slots
    assert numbers.drop >= numbers.lookahead


def test_a_tail_that_the_budget_cannot_hold_is_refused():
    shape = ModelShape(layers=1, kv_heads=1, head_dim=4, element_bytes=4)
    with pytest.raises(BudgetTooSmallError):
        grant(BudgetRequest.tokens(64), PolicyRequest("h2o", "", {"tail": 40}), shape)
    assert grant(BudgetRequest.tokens(64), PolicyRequest("h2o", "", {"tail": 8}), shape).parameters.tail == 8


def test_what_cannot_be_protected_is_refused():
    with pytest.raises(InvalidRequestError, match="no preset 'full'"):
        get_policy("protected", "full")
