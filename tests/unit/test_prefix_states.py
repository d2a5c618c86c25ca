"""A row put together from a stored prefix is, in every number, the one that has read the tokens."""

from dataclasses import replace

import pytest
import torch
from support.policy_names import POLICIES
from support.prefix_data import read_prompt
from support.sliding_models import sliding_model
from support.speaker import Speaker
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.prefix_state import put, save, state_bytes

IDS = random_tokens(300, seed=1).tolist()
EVERY = 80


def chains(places):
    """Return what can be loaded: all that grew, and the last whole state."""
    grown, whole = ([place for place in places if place.whole is kind] for kind in (False, True))
    assert len(grown) > 1
    assert whole
    return grown, whole[-1:]


@torch.inference_mode()
def same_from_each_prefix(here, there):
    """Read a prompt here; go on there from what was stored, and here from the beginning."""
    places, pieces = read_prompt(here, here.cache.add_row(here.grant), IDS, EVERY)
    for chain in chains(places):
        read, arrived = here.cache.add_row(here.grant), there.cache.add_row(there.grant)
        put(arrived, [pieces[place.step] for place in chain])
        assert (arrived.step, arrived.epoch > 0) == (chain[-1].step, chain[-1].whole)
        stayed, went = list(IDS), list(IDS)
        assert torch.equal(here.turn(read, stayed, 30), there.turn(arrived, went, 30))
        assert stayed == went
        assert (read.lengths, read.epoch) == (arrived.lengths, arrived.epoch)
        for one, other in zip(read.pool.layers, arrived.pool.layers, strict=True):
            for mine, theirs in zip(one.tensors(), other.tensors(), strict=True):
                assert torch.equal(mine[read.index], theirs[arrived.index])


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy(policy):
    here, there = (Speaker(tiny_model("llama_grouped"), policy, BudgetRequest.tokens(160)) for _ in range(2))
    same_from_each_prefix(here, there)


@pytest.mark.parametrize("codec", ["int8", "turboquant:k3v2", "klt:k4v3"])
def test_packed_slots_are_not_encoded_anew(codec):
    here, there = (Speaker(tiny_model("llama_grouped"), "h2o", BudgetRequest.tokens(160), codec=codec) for _ in "ab")
    same_from_each_prefix(here, there)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_rings_of_sliding_layers(name):
    here, there = (Speaker(sliding_model(name), "h2o", BudgetRequest.tokens(160)) for _ in range(2))
    if name == "gemma3":
        same_from_each_prefix(here, there)
        return
    # Where all layers slide nothing is ever evicted.
    with torch.inference_mode():
        places, pieces = read_prompt(here, here.cache.add_row(here.grant), IDS, EVERY)
        assert not any(place.whole for place in places)
        arrived = there.cache.add_row(there.grant)
        put(arrived, [pieces[place.step] for place in places])
        stayed, went = list(IDS), list(IDS)
        read = here.turn(here.cache.add_row(here.grant), stayed, 20)
        assert torch.equal(read, there.turn(arrived, went, 20))


@torch.inference_mode()
def test_before_the_first_eviction_budgets_share_a_prefix():
    """Of the same chunk only."""
    here = Speaker(tiny_model("llama_grouped"), "h2o", BudgetRequest.tokens(160))
    more = Speaker(tiny_model("llama_grouped"), "h2o", BudgetRequest.tokens(240))
    parameters = replace(more.grant.parameters, chunk=here.grant.parameters.chunk)
    more.grant = replace(more.grant, parameters=parameters)
    _, pieces = read_prompt(here, here.cache.add_row(here.grant), IDS, EVERY)
    places, own = read_prompt(more, more.cache.add_row(more.grant), IDS, EVERY)
    grown = [place for place in places if not place.whole]
    assert [place.step for place in grown] == [80, 160, 240]
    for step in (80, 160):
        assert pieces[step].manifest == own[step].manifest
    arrived = more.cache.add_row(more.grant)
    put(arrived, [pieces[80], pieces[160], own[240]])
    stayed, went = list(IDS), list(IDS)
    read = more.cache.add_row(more.grant)
    assert torch.equal(more.turn(read, stayed, 20), more.turn(arrived, went, 20))


@torch.inference_mode()
def test_what_does_not_fit_leaves_a_row_empty():
    here, there = (Speaker(tiny_model("llama_grouped"), "h2o", BudgetRequest.tokens(160)) for _ in range(2))
    _, pieces = read_prompt(here, here.cache.add_row(here.grant), IDS, EVERY)
    first, second = pieces[80], pieces[160]
    for chain in (
        [second],
        [first, first],
        [first, second._replace(grown=second.grown[:-16])],
        [first, second._replace(evidence=second.evidence[:-4])],
        [first._replace(manifest=replace(first.manifest, lengths=(80,)))],
        [first._replace(manifest=replace(first.manifest, lengths=(81, 80)))],
        [first, second._replace(manifest=replace(second.manifest, lengths=(160, 70)))],
    ):
        row = there.cache.add_row(there.grant)
        with pytest.raises(CorruptRowError):
            put(row, chain)
        assert (row.step, row.lengths, row.epoch) == (0, [0, 0], 0)
        there.cache.remove_row(row)
    row = there.cache.add_row(there.grant)
    put(row, [first])
    with pytest.raises(CorruptRowError):
        put(row, [first])


@torch.inference_mode()
def test_a_row_that_has_evicted_is_saved_whole_only():
    here = Speaker(tiny_model("llama_grouped"), "h2o", BudgetRequest.tokens(160))
    row = here.cache.add_row(here.grant)
    read_prompt(here, row, IDS, EVERY)
    assert row.epoch
    with pytest.raises(EngineError):
        save(row, 80)
    assert sum(map(len, save(row, 0))) == state_bytes(row, 0)
