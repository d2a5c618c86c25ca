"""Budgets shared between KV heads by what eviction costs them."""

import itertools
import json
import math

import pytest

from scissorhands.budget import BudgetRequest, ModelShape, slots_to_drop
from scissorhands.errors import InvalidRequestError
from scissorhands.grant import PolicyRequest, grant, grant_text
from scissorhands.profile import FILE_NAME, Profile, share_out
from scissorhands.wire import grant_message, profile_message, read_grant, read_profile

SHARES = (0.1, 0.2, 0.4, 0.8)
SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=64, element_bytes=4)
# A head that hardly cares, two alike, and one that needs nearly everything.
LOSSES = (
    ((1e-7, 1e-8, 1e-9, 0.0), (1e-2, 4e-3, 1e-3, 1e-5)),
    ((1e-2, 4e-3, 1e-3, 1e-5), (3e-2, 1.2e-2, 3e-3, 3e-5)),
)
PROFILE = Profile("weights", SHARES, LOSSES)
HEADS = (0, 1, 2, 3)


def losses_of(slots, total):
    """Return the sum of losses, by power laws between the measured shares, written out apart from the program."""
    found = 0.0
    for head, held in enumerate(slots):
        points = [*zip(SHARES, LOSSES[head // 2][head % 2], strict=True), (1.0, 0.0)]
        share = held / total
        points = [(known, max(loss, 1e-9)) for known, loss in points]
        for (a, low), (b, high) in itertools.pairwise(points):
            if a <= share <= b:
                found += low * (share / a) ** (math.log(high / low) / math.log(b / a))
                break
        else:
            raise AssertionError(share)
    return found


def test_heads_that_lose_more_get_more():
    none, first, second, most = share_out(PROFILE, HEADS, 200, 20, 1000)
    assert none == 100  # Half of an equal share, and no less.
    assert most > first > none
    assert abs(first - second) <= 2 * 1000 / 64
    assert 800 - 4 < none + first + second + most <= 800


def test_no_other_division_loses_less():
    chosen = share_out(PROFILE, HEADS, 200, 20, 1000)
    best = losses_of(chosen, 1000)
    assert best < 0.7 * losses_of([200] * 4, 1000)
    for giver, taker in itertools.permutations(HEADS, 2):
        moved = list(chosen)
        moved[giver] -= 30
        moved[taker] += 30
        if min(moved) >= 100:
            assert losses_of(moved, 1000) > 0.999 * best


@pytest.mark.parametrize(("slots", "least", "total"), [(1000, 20, 1000), (200, 200, 1000), (200, 250, 1000)])
def test_without_room_all_get_as_much(slots, least, total):
    assert share_out(PROFILE, HEADS, slots, least, total) == [slots] * 4


def test_nobody_gets_more_than_the_sequence_has():
    assert max(share_out(PROFILE, HEADS, 600, 20, 1000)) <= 1000


def test_a_length_is_guessed_if_unknown():
    assert sum(share_out(PROFILE, HEADS, 200, 20, None)) <= 800


def test_a_grant_by_head_takes_no_more_bytes():
    even = grant(BudgetRequest.tokens(200), PolicyRequest("scissorhands", "uniform"), SHAPE, 1000, PROFILE)
    shared = grant(BudgetRequest.tokens(200), PolicyRequest("scissorhands"), SHAPE, 1000, PROFILE)
    assert (even.by_head, even.layer_slots) == (False, (200, 200))
    assert shared.by_head
    assert shared.layer_slots == tuple(share_out(PROFILE, HEADS, 200, even.parameters.smallest_layer, 1000))
    assert shared.bytes == sum(shared.layer_slots) * (SHAPE.slot_bytes + 8) <= even.bytes
    assert shared.parameters == even.parameters
    assert grant_text(shared) != grant_text(grant(BudgetRequest.tokens(200), PolicyRequest("scissorhands"), SHAPE))


def test_every_head_has_room_for_a_chunk_and_an_eviction():
    for slots in range(20, 400, 7):
        shared = grant(BudgetRequest.tokens(slots), PolicyRequest("scissorhands"), SHAPE, 1000, PROFILE)
        numbers = shared.parameters
        for own in shared.layer_slots:
            assert own >= numbers.smallest_layer
            assert numbers.within(own).exempt + max(numbers.drop, numbers.chunk) <= own
            (dropped,) = slots_to_drop([own], [own], numbers, numbers.chunk)
            assert dropped == max(numbers.drop, numbers.chunk)


def test_sliding_layers_keep_their_windows():
    shape = ModelShape(layers=2, kv_heads=2, head_dim=64, element_bytes=4, layer_windows=(48, 0))
    shared = grant(BudgetRequest.tokens(200), PolicyRequest("scissorhands"), shape, 1000, PROFILE)
    assert shared.layer_slots[:2] == (48, 48)
    assert 400 - 2 < sum(shared.layer_slots[2:]) <= 400
    assert shared.bytes == 96 * shape.slot_bytes + sum(shared.layer_slots[2:]) * (shape.slot_bytes + 8)


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(InvalidRequestError, match="calibrate this model") as caught:
        grant(BudgetRequest.tokens(200), PolicyRequest("scissorhands"), ModelShape(3, 2, 64, 4), 1000, PROFILE)
    assert caught.value.field == "profile"


def test_a_profile_and_its_grant_survive_the_wire():
    assert read_profile(profile_message(PROFILE), SHAPE) == PROFILE
    shared = grant(BudgetRequest.tokens(200), PolicyRequest("scissorhands"), SHAPE, 1000, PROFILE)
    assert read_grant(grant_message(shared, 1, "int4")) == shared
    with pytest.raises(InvalidRequestError, match="3 x 2 x 4"):
        read_profile(profile_message(PROFILE), ModelShape(3, 2, 64, 4))


def test_a_profile_is_saved_and_found(tmp_path):
    assert Profile.find(str(tmp_path)) is None
    PROFILE.save(tmp_path / FILE_NAME, {"command": "scissorhands calibrate"})
    assert Profile.find(str(tmp_path)) == PROFILE == Profile.load(tmp_path / FILE_NAME)
    assert json.loads((tmp_path / FILE_NAME).read_text())["about"] == {"command": "scissorhands calibrate"}
    with pytest.raises(InvalidRequestError, match="cannot read"):
        Profile.find(str(tmp_path), tmp_path / "missing.json")


@pytest.mark.parametrize(
    "broken",
    ["[", "{}", '{"format": 2}', '{"format": 1, "model": "", "shares": [0.1, 0.2], "losses": [[[1, -1]]]}'],
)
def test_broken_files_are_refused(tmp_path, broken):
    path = tmp_path / "profile.json"
    path.write_text(broken)
    with pytest.raises(InvalidRequestError) as caught:
        Profile.load(path)
    assert caught.value.field.startswith("profile")


@pytest.mark.parametrize("shares", [(0.1,), (0.2, 0.1), (0.1, 0.1), (0.0, 0.5), (0.5, 1.0)])
def test_shares_must_rise_between_nothing_and_all(shares):
    with pytest.raises(InvalidRequestError) as caught:
        Profile("", shares, ((tuple(0.0 for _ in shares),),))
    assert caught.value.field == "profile.shares"


@pytest.mark.parametrize("losses", [((),), (((0.1, 0.2, 0.3),),), (((0.1, float("nan")),),), (((0.1, float("inf")),),)])
def test_losses_must_be_finite_and_complete(losses):
    with pytest.raises(InvalidRequestError) as caught:
        Profile("", (0.1, 0.2), losses)
    assert caught.value.field == "profile.losses"
