"""A turn of a session: the grant that it goes on under, and the memory that its row takes."""

from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry
from support.suspended_data import asked, manifest_of
from support.tiny_models import random_tokens

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.v1 import budget_pb2
from scissorhands.wire import grant_message, read_grant
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.suspension_metrics import SuspensionMetrics
from scissorhands_server.worker.turn import Memory, ResumedRow, Turn

SHAPE = ModelShape(2, 2, 8, 4)
H2O = PolicyRequest("h2o")
IDS = random_tokens(30, seed=0).tolist()


def message(tokens, total=400, shape=SHAPE, codec="none"):
    granted = grant(BudgetRequest.tokens(tokens), H2O, shape, total, codec=codec)
    return grant_message(granted, budget_pb2.GRANT_SOURCE_MANAGER, "int4")


@pytest.fixture
def registry():
    return CollectorRegistry()


def turn_of(registry, held=None, lengths=(40, 40), bound=1 << 20):
    """Return a turn that resumes a row of 100 tokens under a grant."""
    registry_metrics = SuspensionMetrics(registry)
    turn = Turn(asked(), 7, Memory(bound, registry_metrics.held.set), registry_metrics)
    if held is not None:
        manifest = manifest_of([b"x" * 100], step=100, lengths=lengths, grant=held.SerializeToString())
        assert turn.memory.take(manifest.state_bytes)
        turn.resumed = ResumedRow(manifest, read_grant(held), held, Arrival([100], turn.memory))
    return turn


def value(registry, name, **labels):
    return registry.get_sample_value(f"scissorhands_worker_{name}", labels)


def test_a_turn_goes_on_under_its_own_grant_if_the_row_fits(registry):
    held, granted = message(40), message(60)
    turn = turn_of(registry, held)
    assert turn.grant_for(granted, SHAPE, 400) == turn.grant == granted
    assert turn.resumed_tokens == 100


@pytest.mark.parametrize("granted", [message(30), message(60, codec="int8")], ids=["fewer slots", "another format"])
def test_else_it_goes_on_under_the_grant_that_the_row_had(registry, granted):
    held = message(40)
    held.lease.seconds, granted.lease.seconds = 9, 8
    turn = turn_of(registry, held)
    chosen = turn.grant_for(granted, SHAPE, 400)
    assert (list(chosen.layer_slots), list(chosen.resident_codecs)) == ([40, 40], [])
    assert chosen.lease.seconds == 8
    assert turn.resumed is not None


def test_a_row_that_neither_takes_is_read_anew(registry):
    """A ring that has come round cannot grow."""
    sliding = replace(SHAPE, layer_windows=(0, 64))
    held, granted = message(40, total=50, shape=sliding), message(40, total=400, shape=sliding)
    turn = turn_of(registry, held, lengths=(40, 50))
    assert turn.grant_for(granted, sliding, 400) == granted
    assert (turn.resumed, turn.resumed_tokens) == (None, 0)
    assert value(registry, "resumes_total", result="budget") == 1
    assert value(registry, "suspension_held_bytes") == 0


def test_a_row_is_kept_and_restored_within_a_bound(registry):
    cache = ResidentCache(SHAPE, torch.float32, torch.device("cpu"))
    row = cache.add_row(read_grant(message(40)))
    row.advance(30)
    turn = turn_of(registry)
    turn.save(row, [*IDS, 5])
    size = len(turn.kept.data)
    assert value(registry, "suspension_held_bytes") == size > 0
    # What it holds is counted until it is sent.
    small = turn_of(CollectorRegistry(), bound=size - 1)
    small.save(row, IDS)
    assert small.kept is None
    assert small.metrics.suspends.labels("no_room")._value.get() == 1
    turn.drop_kept()
    assert value(registry, "suspension_held_bytes") == 0


def test_a_row_of_another_size_is_dropped_and_its_prompt_read(registry):
    held = message(40)
    turn = turn_of(registry, held)
    row = ResidentCache(SHAPE, torch.float32, torch.device("cpu")).add_row(read_grant(held))
    assert turn.incoming(row, list(range(200))) is None
    assert (row.step, turn.resumed) == (0, None)
    assert value(registry, "resumes_total", result="corrupt") == 1
    assert value(registry, "resumes_total", result="resumed") == 0
    assert value(registry, "suspension_held_bytes") == 0
