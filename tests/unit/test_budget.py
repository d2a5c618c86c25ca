"""Budgets: what is asked for, the smallest that is valid, and how many slots must go."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.budget import (
    BudgetRequest,
    EvictionParameters,
    ModelShape,
    apply_overrides,
    resolve_slots,
    slots_to_drop,
    smallest_budget,
)
from scissorhands.errors import BudgetTooSmallError, InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.policies import POLICIES, get_policy

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=8, element_bytes=4)
ALL = [(name, preset) for name, policy in POLICIES.items() for preset in policy.presets]


def fixed(recent=2, sinks=1, drop=3, lookahead=2, chunk=4, window=0):
    return lambda slots: EvictionParameters(recent, sinks, drop, lookahead, chunk, window)


@pytest.mark.parametrize(
    ("make", "amount", "field"),
    [
        (BudgetRequest.tokens, 0, "budget.tokens"),
        (BudgetRequest.tokens, -1, "budget.tokens"),
        (BudgetRequest.tokens, 1.5, "budget.tokens"),
        (BudgetRequest.bytes, 0, "budget.bytes"),
        (BudgetRequest.bytes, math.inf, "budget.bytes"),
        (BudgetRequest.fraction, 0, "budget.fraction"),
        (BudgetRequest.fraction, -0.1, "budget.fraction"),
        (BudgetRequest.fraction, 1.01, "budget.fraction"),
        (BudgetRequest.fraction, math.nan, "budget.fraction"),
    ],
)
def test_amounts_out_of_range_name_the_field(make, amount, field):
    with pytest.raises(InvalidRequestError) as caught:
        make(amount)
    assert caught.value.field == field


def test_a_fraction_is_a_share_of_prompt_and_answer():
    assert resolve_slots(BudgetRequest.fraction(0.2), fixed(), 100, 500) == (100, False)


def test_a_small_fraction_is_raised_and_says_so():
    # s + max(r, L) + max(m, c) = 1 + 2 + 4
    assert resolve_slots(BudgetRequest.fraction(0.01), fixed(), 100, 500) == (7, True)


def test_a_fraction_of_an_unknown_length_is_refused():
    with pytest.raises(InvalidRequestError, match="tokens or bytes"):
        resolve_slots(BudgetRequest.fraction(0.5), fixed(), 100, None)


def test_bytes_are_rounded_down_to_whole_slots():
    assert resolve_slots(BudgetRequest.bytes(1099), fixed(), 100, 500) == (10, False)


def test_a_budget_below_the_smallest_is_refused_with_the_smallest():
    with pytest.raises(BudgetTooSmallError, match="the smallest is 7 tokens") as caught:
        resolve_slots(BudgetRequest.tokens(6), fixed(), 100, 500)
    assert caught.value.smallest == 7
    with pytest.raises(BudgetTooSmallError, match="the smallest is 700 bytes"):
        resolve_slots(BudgetRequest.bytes(699), fixed(), 100, 500)
    assert resolve_slots(BudgetRequest.tokens(7), fixed(), 100, 500) == (7, False)
    assert resolve_slots(BudgetRequest.bytes(700), fixed(), 100, 500) == (7, False)


def test_a_budget_beyond_the_length_is_the_length():
    assert resolve_slots(BudgetRequest.tokens(2**62), fixed(), 100, 50) == (50, False)
    # Below the smallest too, because nothing is ever evicted.
    assert resolve_slots(BudgetRequest.tokens(5), fixed(), 100, 5) == (5, False)


def test_dropping_fewer_than_the_lookahead_is_refused():
    with pytest.raises(InvalidRequestError, match="at least lookahead") as caught:
        resolve_slots(BudgetRequest.tokens(100), fixed(drop=1, lookahead=2), 100, 500)
    assert caught.value.field == "policy.parameters.drop"


def test_overrides_replace_only_what_they_name():
    parameters = apply_overrides(fixed(), {"recent": 9, "window": 64})(10)
    assert parameters == EvictionParameters(recent=9, sinks=1, drop=3, lookahead=2, chunk=4, window=64)


@pytest.mark.parametrize(("name", "value"), [("recnet", 1), ("drop", 0), ("chunk", 0), ("sinks", -1)])
def test_bad_overrides_name_the_parameter(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        apply_overrides(fixed(), {name: value})
    assert caught.value.field == f"policy.parameters.{name}"


@pytest.mark.parametrize(
    ("lengths", "budgets", "drop", "incoming", "expected"),
    [
        ([9, 9], [10, 10], 4, 1, [0, 0]),  # Just fits.
        ([10, 10], [10, 10], 4, 1, [4, 4]),  # max(m, n + a - B) = max(4, 1)
        ([10, 10], [10, 10], 4, 6, [6, 6]),  # max(4, 6)
        ([10, 7], [10, 8], 4, 1, [4, 4]),  # The second would overflow within m more tokens.
        ([10, 4], [10, 8], 4, 1, [4, 0]),  # The second would not: 4 + 1 + 3 = 8.
        ([10, 6], [10, 9], 3, 1, [3, 0]),  # 6 + 1 + 2 = 9
        ([10, 5], [10, 8], 4, 1, [4, 2]),  # 5 + 1 + 3 = 9, but 3 of the 5 slots are exempt.
        ([10], [10], 1, 1, [1]),
        ([8], [11], 8, 4, [5]),  # It must drop 1 and would drop 8, but 3 of the 8 slots are exempt.
        ([4], [10], 8, 8, [2]),  # Here the 2 that it must drop are more than the 1 that is not exempt.
    ],
)
def test_slots_to_drop(lengths, budgets, drop, incoming, expected):
    parameters = fixed(recent=2, sinks=1, drop=drop, lookahead=1)(10)
    assert slots_to_drop(lengths, budgets, parameters, incoming) == expected


@pytest.mark.parametrize(("name", "preset"), ALL)
def test_the_smallest_budget_is_the_smallest(name, preset):
    parameters = get_policy(name, preset).parameters
    smallest = smallest_budget(parameters)
    assert parameters(smallest).smallest_budget <= smallest
    assert all(parameters(slots).smallest_budget > slots for slots in range(1, smallest))


@pytest.mark.parametrize(("name", "preset"), ALL)
@settings(deadline=None, derandomize=True)
@given(overrides=st.dictionaries(st.sampled_from(["recent", "sinks", "drop", "chunk"]), st.integers(1, 2**32 - 1)))
def test_the_smallest_budget_of_any_overrides_is_found_and_valid(name, preset, overrides):
    parameters = apply_overrides(get_policy(name, preset).parameters, overrides)
    smallest = smallest_budget(parameters)
    assert parameters(smallest).smallest_budget <= smallest
    assert smallest == 1 or parameters(smallest - 1).smallest_budget > smallest - 1


@pytest.mark.parametrize(("name", "preset"), [pair for pair in ALL if pair[0] != "full"])
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("total", [64, 1000, 40_000])
def test_every_grant_below_the_length_keeps_the_rules(name, preset, fraction, total):
    granted = grant(BudgetRequest.fraction(fraction), PolicyRequest(name, preset), SHAPE, total)
    (slots,) = set(granted.layer_slots)
    numbers = granted.parameters
    assert len(granted.layer_slots) == 3
    assert slots <= total
    if slots < total:
        assert numbers.drop >= numbers.lookahead
        assert slots >= numbers.sinks + max(numbers.recent, numbers.lookahead) + max(numbers.drop, numbers.chunk)
        assert granted.raised or slots == round(fraction * total)


def test_the_granted_bytes_are_keys_values_and_evidence_of_all_slots():
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("h2o"), SHAPE, 1000)
    # 2 * 8 elements of 4 bytes, a position of 4 and a mass of 4; 3 layers, 2 heads.
    assert granted.bytes == 64 * 3 * 2 * (2 * 8 * 4 + 4 + 4)
    low_counts = grant(BudgetRequest.tokens(64), PolicyRequest("scissorhands", "counts"), SHAPE, 1000)
    assert low_counts.bytes == granted.bytes + 64 * 3 * 2 * 2
    ring = grant(BudgetRequest.tokens(64), PolicyRequest("scissorhands", "paper"), SHAPE, 1000)
    assert ring.bytes == granted.bytes + 64 * 3 * 2 * 400


def test_a_budget_in_bytes_is_never_exceeded():
    for amount in range(40_000, 60_000, 777):
        granted = grant(BudgetRequest.bytes(amount), PolicyRequest("scissorhands"), SHAPE, 1000)
        assert granted.bytes <= amount


def test_full_refuses_a_budget_below_the_length():
    with pytest.raises(InvalidRequestError, match="needs 100 slots"):
        grant(BudgetRequest.tokens(99), PolicyRequest("full"), SHAPE, 100)
    assert grant(BudgetRequest.tokens(100), PolicyRequest("full"), SHAPE, 100).layer_slots == (100, 100, 100)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (PolicyRequest("h3o"), "policy.name"),
        (PolicyRequest("h2o", "paper"), "policy.preset"),
        (PolicyRequest("scissorhands", "counts", {"window": 0}), "policy.parameters.window"),
        (PolicyRequest("scissorhands", "counts", {"window": 3}), "policy.parameters.window"),
        (PolicyRequest("scissorhands", "counts", {"window": 512}), "policy.parameters.window"),
        (PolicyRequest("scissorhands", "paper", {"window": 0}), "policy.parameters.window"),
    ],
)
def test_policies_that_cannot_be_name_the_field(policy, field):
    with pytest.raises(InvalidRequestError) as caught:
        grant(BudgetRequest.tokens(500), policy, SHAPE, 1000)
    assert caught.value.field == field


def test_full_bytes():
    assert SHAPE.full_bytes(10) == 10 * 3 * 2 * 2 * 8 * 4
    assert SHAPE.full_bytes(10, element_bytes=2) == 10 * 3 * 2 * 2 * 8 * 2


def test_a_chunk_has_a_bound_whatever_is_asked():
    policy = PolicyRequest("h2o", parameters={"chunk": 1025})
    with pytest.raises(InvalidRequestError) as caught:
        grant(BudgetRequest.tokens(5000), policy, SHAPE, 10_000)
    assert caught.value.field == "policy.parameters.chunk"
    assert "1024" in caught.value.description
    assert grant(BudgetRequest.tokens(5000), PolicyRequest("h2o", parameters={"chunk": 1024}), SHAPE, 10_000)
