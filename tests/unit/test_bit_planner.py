"""Slots and bits of every head together."""

from itertools import product

import numpy as np
import pytest

from scissorhands.bit_planner import plan_bits
from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import parse
from scissorhands.grant import PLANNED, PolicyRequest, grant
from scissorhands.profile import KEY_BITS, VALUE_BITS, Profile

SHAPE = ModelShape(layers=1, kv_heads=2, head_dim=64, element_bytes=2, group=3)
SHARES = (0.1, 0.25, 0.5, 0.8)
EVIDENCE, TOTAL = 8, 1000


def profile(evicting=(1.0, 1.0), keys=(1.0, 1.0), values=(1.0, 1.0)) -> Profile:
    """Return one whose heads lose so much by eviction, and by fewer bits of keys and values."""
    losses = tuple(tuple(scale * (1 / share - 1) for share in SHARES) for scale in evicting)
    bits = tuple(
        tuple([key * 4.0**-own for own in KEY_BITS] + [value * 4.0**-own for own in VALUE_BITS])
        for key, value in zip(keys, values, strict=True)
    )
    return Profile("", SHARES, (losses,), (bits,))


def planned(own: Profile, bytes_: int, equal: int = 200):
    return plan_bits(own, SHAPE, bytes_, EVIDENCE, equal, 20, TOTAL)


def size(plans) -> int:
    return sum(plan.slots * (parse(plan.codec).slot_bytes(64, 2) + EVIDENCE) for plan in plans)


@pytest.mark.parametrize("bytes_", [30_000, 60_000, 150_000])
def test_it_spends_the_bytes_and_no_more(bytes_):
    plans = planned(profile(), bytes_)
    assert 0.9 * bytes_ < size(plans) <= bytes_
    assert all(100 <= plan.slots <= TOTAL for plan in plans)


def test_a_head_that_loses_more_by_eviction_gets_more_slots():
    first, second = planned(profile(evicting=(1.0, 0.01)), 60_000)
    assert first.slots > second.slots


def test_a_head_that_loses_more_by_fewer_bits_gets_more_bits():
    first, second = planned(profile(keys=(1000.0, 0.1)), 60_000)
    assert parse(first.codec).key_bits > parse(second.codec).key_bits
    keys_matter = planned(profile(keys=(1000.0, 1000.0), values=(0.1, 0.1)), 60_000)
    assert all(parse(plan.codec).key_bits > parse(plan.codec).value_bits for plan in keys_matter)


def test_no_fixed_format_with_equal_slots_loses_less():
    own = profile(evicting=(0.05, 0.001), keys=(3.0, 0.2), values=(0.5, 1.0))

    def loss(head: int, slots: int, codec: str) -> float:
        found = parse(codec)
        bits = own.bits[0][head]
        stored = bits[KEY_BITS.index(found.key_bits)] + bits[len(KEY_BITS) + VALUE_BITS.index(found.value_bits)]
        known = np.log([*SHARES, 1.0]), np.log([*own.losses[0][head], 1e-9])
        return stored + (float(np.exp(np.interp(np.log(slots / TOTAL), *known))) if slots < TOTAL else 0.0)

    for bytes_ in (30_000, 60_000, 150_000):
        plans = planned(own, bytes_)
        reached = sum(loss(head, plan.slots, plan.codec) for head, plan in enumerate(plans))
        for key, value in product(KEY_BITS, VALUE_BITS):
            codec = f"klt:k{key:g}v{value:g}"
            slots = min(TOTAL, bytes_ // 2 // (parse(codec).slot_bytes(64, 2) + EVIDENCE))
            if slots >= 100:
                assert reached <= 1.02 * sum(loss(head, slots, codec) for head in range(2))


def test_too_few_bytes_and_missing_losses_are_refused():
    with pytest.raises(InvalidRequestError, match="the smallest plan takes"):
        planned(profile(), 1000)
    without = Profile("", SHARES, profile().losses)
    with pytest.raises(InvalidRequestError, match="run scissorhands calibrate again"):
        planned(without, 60_000)


@pytest.mark.parametrize("compression", [5, 10, 20])
def test_a_grant_of_a_compression_holds_to_it(compression):
    own = profile(evicting=(0.3, 0.01), keys=(2.0, 0.2))
    granted = grant(
        BudgetRequest.compression(compression), PolicyRequest("scissorhands"), SHAPE, 4000, own, codec=PLANNED
    )
    full = SHAPE.full_bytes(4000, 2)
    assert granted.by_head
    assert len(granted.codecs) == len(granted.layer_slots) == 2
    taken = sum(
        slots * (parse(codec).slot_bytes(64, 2) + EVIDENCE)
        for slots, codec in zip(granted.layer_slots, granted.codecs, strict=True)
    )
    assert granted.bytes == taken
    assert compression <= full / granted.bytes < 1.1 * compression
