"""A row that is saved and restored elsewhere goes on exactly as if it had never been away."""

from dataclasses import replace

import pytest
import torch
from support.policy_names import POLICIES
from support.sliding_models import WINDOW, sliding_model
from support.speaker import Speaker
from support.suspended_data import identity, suspended
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.row import Row
from scissorhands.row_state import restore, save, state_bytes
from scissorhands.suspended import takes

FORMATS = ["int8", "int4-hadamard", "turboquant:k3v2", "klt:k4v3"]
EVERYTHING = BudgetRequest.fraction(1.0)
FIRST, SECOND = random_tokens(70, seed=1).tolist(), random_tokens(25, seed=2).tolist()


def moved(row: Row, ids: list[int], there: Speaker) -> Row:
    """Save a row, as bytes, and restore it in another worker."""
    manifest, parts = suspended(row, ids[: row.step])
    assert takes(there.grant, row.grant, manifest, there.shape, 400)
    arrived = there.cache.add_row(there.grant)
    restore(arrived, manifest, bytearray(b"".join(parts)), ids[: manifest.step])
    return arrived


def both_ways(here: Speaker, there: Speaker, new: int = 30, expect_pending: bool | None = None):
    """Hold a conversation of two turns, once in one worker and once in two; both must be the same in every number."""
    row, ids = here.cache.add_row(here.grant), list(FIRST)
    here.turn(row, ids, new)
    if expect_pending is not None:
        assert (row.pending is not None) is expect_pending
    arrived, again = moved(row, ids, there), [*ids]
    evictions = len(here.evictions)
    ids += SECOND
    again += SECOND
    stayed, went = here.turn(row, ids, 40), there.turn(arrived, again, 40)
    assert torch.equal(stayed, went)
    assert ids == again
    assert here.evictions[evictions:] == there.evictions
    return row, arrived


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_goes_on_under_every_policy(policy):
    here, there = (Speaker(tiny_model("llama_grouped"), policy, BudgetRequest.tokens(160)) for _ in range(2))
    row, _ = both_ways(here, there, new=120)
    assert row.epoch > 1


@pytest.mark.parametrize("codec", FORMATS)
def test_a_packed_row_goes_on_without_being_encoded_anew(codec):
    here, there = (Speaker(tiny_model("llama_grouped"), codec=codec) for _ in range(2))
    row, arrived = both_ways(here, there)
    assert row.epoch > 1
    for one, other in zip(row.pool.layers, arrived.pool.layers, strict=True):
        assert torch.equal(one.keys[row.index], other.keys[arrived.index])


def test_a_row_with_budgets_by_head_goes_on():
    here, there = (Speaker(tiny_model("llama_grouped")) for _ in range(2))
    for speaker in (here, there):
        speaker.grant = replace(speaker.grant, layer_slots=(40, 44, 52, 38), by_head=True)
    row, _ = both_ways(here, there)
    assert len({*row.lengths}) > 1


@pytest.mark.parametrize(
    ("name", "prompt", "new"),
    [("llama_grouped", 70, 30), ("gemma3", 20, 8), ("gemma3", 8, 4)],
    ids=["global", "ring_came_round", "ring_grows"],
)
def test_a_full_row_goes_on_in_more_slots(name, prompt, new):
    """The longer a conversation, the larger the grant of its turn. A row that has all of it from the start is the same.

    Chunks are larger in more slots, and sums are then in another order.
    """
    model = sliding_model(name) if name == "gemma3" else tiny_model(name)
    here = Speaker(model, budget=EVERYTHING, total=200)
    first, there = (Speaker(model, budget=EVERYTHING, total=total) for total in (prompt + new, 200))
    row, ids = first.cache.add_row(first.grant), FIRST[:prompt]
    stayed, same = here.cache.add_row(here.grant), FIRST[:prompt]
    first.turn(row, ids, new)
    here.turn(stayed, same, new)
    if name == "gemma3":
        assert (row.step > WINDOW) is (prompt == 20)
    arrived = moved(row, ids, there)
    ids, same = [*ids, *SECOND], [*same, *SECOND]
    torch.testing.assert_close(here.turn(stayed, same, 40), there.turn(arrived, ids, 40), rtol=1e-4, atol=1e-4)
    assert ids == same
    assert arrived.epoch == 0


def test_a_snapshot_in_flight_is_forgotten_on_both_sides():
    here, there = (Speaker(tiny_model("llama_grouped"), "h2o") for _ in range(2))
    new, pending = 1, None
    while pending is None:
        new += 1
        row = here.cache.add_row(here.grant)
        here.turn(row, list(FIRST), new)
        pending = row.pending
    both_ways(here, there, new=new, expect_pending=True)


def test_what_a_grant_takes():
    worker = Speaker(tiny_model("llama_grouped"))
    row, ids = worker.cache.add_row(worker.grant), list(FIRST)
    worker.turn(row, ids, 20)
    manifest, _ = suspended(row, ids[: row.step])
    held, shape = worker.grant, worker.shape
    more, fewer = (replace(held, layer_slots=(slots,) * 2) for slots in (50, max(row.lengths) - 1))
    assert takes(held, held, manifest, shape, 400)
    assert takes(more, held, manifest, shape, 400)
    assert not takes(fewer, held, manifest, shape, 400)
    assert not takes(replace(held, policy="tova"), held, manifest, shape, 400)
    assert not takes(replace(held, codecs=("int4", "int4")), held, manifest, shape, 400)
    assert not takes(replace(held, by_head=True), held, manifest, shape, 400)


def test_nothing_is_written_unless_all_fits():
    worker = Speaker(tiny_model("llama_grouped"))
    row, ids = worker.cache.add_row(worker.grant), list(FIRST)
    worker.turn(row, ids, 20)
    seen = ids[: row.step]
    manifest, parts = suspended(row, seen)
    data = b"".join(parts)
    assert len(data) == state_bytes(row) == manifest.state_bytes
    fresh = worker.cache.add_row(worker.grant)
    for wrong, bytes_, tokens in (
        (manifest, data[:-1], seen),
        (manifest, data, [*seen[:-1], seen[-1] + 1]),
        (manifest, data, seen[:-1]),
        (replace(manifest, lengths=(41, 41)), data, seen),
        (replace(manifest, lengths=manifest.lengths[:1]), data, seen),
    ):
        with pytest.raises(CorruptRowError):
            restore(fresh, wrong, bytearray(bytes_), tokens)
        assert (fresh.step, fresh.lengths) == (0, [0, 0])
        assert not fresh.pool.layers[0].keys[fresh.index].any()
    with pytest.raises(EngineError):
        save(row, ids)
    assert identity().known_to_manager().tokens == ""
