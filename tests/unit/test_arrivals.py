"""Rows that begin with what is on its way: who waits, for how long, and what becomes of a row that never is whole."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from support.speaker import Speaker
from support.suspended_data import suspended
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.row_state import incoming
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.arrivals import Arrivals
from scissorhands_server.worker.memory import Memory

IDS = random_tokens(120, seed=3).tolist()
NEXT = random_tokens(10, seed=4).tolist()


class Beginning:
    """What a row begins with; notes what became of it."""

    def __init__(self, manifest, size):
        memory = Memory(size, lambda _: None)
        assert memory.take(size)
        self.manifest, self.arrival, self.ends = manifest, Arrival([size], memory), []

    def incoming(self, row, ids):
        return incoming(row, self.manifest, self.arrival.buffers[0], ids[: self.manifest.step]), self.arrival

    def arrived(self):
        self.ends.append("arrived")

    def lost(self, *, corrupt):
        self.ends.append("corrupt" if corrupt else "lost")


class Stage:
    """A worker's row whose slots are on their way, and one that has had them all along.

    Args:
        slots: Their budget.
    """

    def __init__(self, slots=160):
        budget = BudgetRequest.tokens(slots)
        self.here, self.there = (Speaker(tiny_model("llama_grouped"), "h2o", budget) for _ in range(2))
        self.row = self.here.cache.add_row(self.here.grant)
        self.here.turn(self.row, list(IDS), 1)
        manifest, parts = suspended(self.row, IDS)
        self.data = b"".join(parts)
        self.beginning = Beginning(manifest, len(self.data))
        self.arrivals = Arrivals(self.there.step)
        self.task = SimpleNamespace(
            ids=[*IDS, *NEXT], request=SimpleNamespace(prompt=(*IDS, *NEXT)), session_id="s", recall=None, prefix=None,
            row=self.there.cache.add_row(self.there.grant), beginnings=[self.beginning], arriving=None,
        )  # fmt: skip
        self.arrivals.begin(self.seated())

    def seated(self):
        self.task.seat = self.task.row
        return self.task

    def come(self, *, whole=True):
        """Let the bytes come, all of them or none; then nothing comes any more."""

        async def fill():
            arrival = self.beginning.arrival
            if whole:
                arrival.buffers[0][:] = self.data
                arrival._came[0] = len(self.data)

        async def end():
            await self.beginning.arrival.fill(fill())

        asyncio.run(end())

    def holds(self, *, alone=True):
        return self.arrivals.holds(self.there.cache, self.seated(), alone=alone)

    def read(self):
        return self.arrivals.read(self.there.cache, self.seated(), len(NEXT), lambda layer: None)

    def expected(self):
        return self.here.step([self.row], [NEXT])[0]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_others_go_first_until_all_has_come():
    stage = Stage()
    assert stage.task.arriving.held
    assert stage.holds(alone=False)
    stage.come()
    assert not stage.holds(alone=False)
    assert (stage.task.arriving, stage.beginning.ends) == (None, ["arrived"])
    assert torch.equal(stage.read(), stage.expected())


def test_alone_it_reads_on_at_once_and_is_held_if_its_slots_do_not_keep_up():
    stage = Stage()
    assert not stage.holds()
    assert stage.read() is None
    assert stage.holds()
    assert stage.beginning.ends == []
    stage.come()
    assert not stage.holds()
    assert torch.equal(stage.read(), stage.expected())
    assert stage.beginning.ends == ["arrived"]


def test_slots_that_keep_up_are_put_in_place_by_the_pass():
    stage = Stage()
    assert not stage.holds()
    stage.come()
    assert stage.task.arriving is not None
    assert torch.equal(stage.read(), stage.expected())
    assert (stage.task.arriving, stage.beginning.ends) == (None, ["arrived"])


def test_a_row_that_must_evict_first_waits_for_all_its_slots():
    stage = Stage(slots=120)
    assert stage.row.slack < stage.row.next_chunk(len(NEXT))
    assert stage.holds()
    stage.come()
    assert not stage.holds()


def test_a_row_that_recalls_waits_for_all_its_slots():
    stage = Stage()
    stage.task.recall = object()
    assert stage.holds()


@pytest.mark.parametrize("tried", [False, True])
def test_what_never_comes_leaves_an_empty_row(tried):
    stage = Stage()
    if tried:
        assert stage.read() is None
    stage.come(whole=False)
    assert stage.holds()
    assert (stage.task.arriving, stage.beginning.ends) == (None, ["lost"])
    assert (stage.task.row.step, stage.task.row.lengths, stage.task.row.observed_layers) == (0, [0, 0], 0)
    assert not any(tensor[stage.task.row.index].any() for tensor in stage.task.row.pool.layers[0].tensors())
    assert len(stage.there.cache.rows) == 2
    assert not stage.holds()


@pytest.mark.parametrize("settled", [False, True])
def test_the_state_of_other_tokens_leaves_an_empty_row(settled):
    stage = Stage()
    stage.data = b"?" * len(stage.data)
    stage.come()
    if settled:
        assert stage.holds(alone=False)
    else:
        assert stage.read() is None
    assert (stage.task.row.step, stage.beginning.ends) == (0, ["corrupt"])
