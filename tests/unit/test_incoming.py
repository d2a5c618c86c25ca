"""Rows whose first new tokens are read while their slots come are, in every number, the ones that were whole before."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from support.prefix_data import read_prompt
from support.speaker import Speaker
from support.suspended_data import suspended
from support.tiny_models import random_tokens, tiny_model

from scissorhands import prefix_state, row_state
from scissorhands.budget import BudgetRequest
from scissorhands.errors import CorruptRowError

IDS = random_tokens(120, seed=3).tolist()
NEXT = random_tokens(10, seed=4).tolist()
BUDGET = BudgetRequest.tokens(160)


class NotYetError(Exception):
    """A layer has not come."""


class Coming:
    """Bytes that come, into buffers of zeros, when a layer is waited for; none for layers from ``until`` on."""

    def __init__(self, buffers, until=None):
        self.whole = [bytes(data) for data in buffers]
        self.buffers = [memoryview(bytearray(len(data))) for data in buffers]
        self.until = until

    def wait(self, incoming, layer):
        if self.until is not None and layer >= self.until:
            raise NotYetError
        for data, whole, needed in zip(self.buffers, self.whole, incoming.needed(layer), strict=True):
            data[:needed] = whole[:needed]
        incoming.put(layer)


def tensors(row):
    """Return copies of all numbers of a row."""
    return [tensor[row.index].clone() for layer in row.pool.layers for tensor in layer.tensors()]


def same(one, other):
    assert (one.lengths, one.step, one.epoch, one.prompt) == (other.lengths, other.step, other.epoch, other.prompt)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(one), tensors(other), strict=True))


@torch.inference_mode()
def suspended_row(speaker):
    """Return a row, its state's bytes, and what lets a row of another cache begin with them as they come."""
    row = speaker.cache.add_row(speaker.grant)
    speaker.turn(row, list(IDS), 1)
    manifest, parts = suspended(row, IDS)
    return row, [b"".join(parts)], lambda other, buffers: row_state.incoming(other, manifest, buffers[0], IDS)


@torch.inference_mode()
def stored_prefix(speaker):
    """Return the same of the boundaries of a prompt."""
    row = speaker.cache.add_row(speaker.grant)
    places, pieces = read_prompt(speaker, row, [*IDS, 1], 40)
    chain = [pieces[place.step] for place in places]
    assert len(chain) > 1
    buffers = [*(piece.grown for piece in chain), chain[-1].evidence]

    def incoming(other, data):
        *grown, evidence = data
        return prefix_state.incoming(
            other, [piece._replace(grown=own, evidence=evidence) for piece, own in zip(chain, grown, strict=True)]
        )

    fresh = speaker.cache.add_row(speaker.grant)
    prefix_state.put(fresh, chain)
    return fresh, buffers, incoming


KINDS = pytest.mark.parametrize("kind", [suspended_row, stored_prefix])


def speakers(policy="h2o"):
    return (Speaker(tiny_model("llama_grouped"), policy, BUDGET) for _ in range(2))


@KINDS
@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "snapkv"])
@torch.inference_mode()
def test_tokens_are_read_while_slots_come(kind, policy):
    here, there = speakers(policy)
    row, buffers, incoming_of = kind(here)
    coming, arrived = Coming(buffers), there.cache.add_row(there.grant)
    incoming = incoming_of(arrived, coming.buffers)
    incoming.begin()
    logits = there.step([arrived], [NEXT], partial(coming.wait, incoming))[0]
    assert torch.equal(logits, here.step([row], [NEXT])[0])
    same(row, arrived)


@KINDS
@torch.inference_mode()
def test_a_pass_that_was_given_up_is_repeated_once_all_has_come(kind):
    """Meanwhile other rows come, grow and go, and the row moves."""
    here, there = speakers()
    row, buffers, incoming_of = kind(here)
    coming, before, arrived = Coming(buffers, until=1), *(there.cache.add_row(there.grant) for _ in range(2))
    incoming = incoming_of(arrived, coming.buffers)
    incoming.begin()
    for _ in range(2):
        with pytest.raises(NotYetError):
            there.step([arrived], [NEXT], partial(coming.wait, incoming))[0]
    there.cache.remove_row(before)
    other = there.cache.add_row(there.grant)
    there.turn(other, list(IDS), 5)
    coming.until = None
    coming.wait(incoming, len(arrived.lengths) - 1)
    incoming.put_all()
    assert torch.equal(there.step([arrived], [NEXT]), here.step([row], [NEXT]))
    same(row, arrived)


@KINDS
@torch.inference_mode()
def test_nothing_is_needed_of_later_layers(kind):
    here, there = speakers()
    _, buffers, incoming_of = kind(here)
    incoming = incoming_of(there.cache.add_row(there.grant), [memoryview(bytearray(data)) for data in buffers])
    needed = [incoming.needed(layer) for layer in range(here.shape.layers)]
    assert needed[-1] == [len(data) for data in buffers]
    for one, other in pairwise(needed):
        assert all(less < more for less, more in zip(one, other, strict=True))


@torch.inference_mode()
def test_bytes_of_other_tokens_are_put_nowhere():
    here, there = speakers()
    _, (data,), incoming_of = suspended_row(here)
    fresh = there.cache.add_row(there.grant)
    incoming = incoming_of(fresh, [memoryview(bytearray(len(data)))])
    with pytest.raises(CorruptRowError, match="other tokens"):
        incoming.put_all()
    with pytest.raises(CorruptRowError, match="other tokens"):
        incoming.put(0)
    assert (fresh.step, fresh.lengths) == (0, [0, 0])
    with pytest.raises(CorruptRowError, match="instead of"):
        incoming_of(fresh, [memoryview(data[:-1])])
