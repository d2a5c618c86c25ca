"""Snapshots that are not what they say: each is refused by its field, and alone."""

import numpy as np
import pytest
from google.rpc import code_pb2
from support.manager_data import opened, plan_parts, requests_of, same_plan, signals_of, snapshot, spec
from support.processes import ManagerProcess

from scissorhands.v1 import cache_manager_pb2

pb = cache_manager_pb2


@pytest.fixture(scope="module")
def manager():
    process = ManagerProcess(store_url="redis://127.0.0.1:1/0")
    yield process
    process.stop()


def header(messages):
    return messages[0].header


def empty_part(messages):
    messages.insert(1, pb.SnapshotPart())


def missing_layer(messages):
    del messages[-1]


def layer_too_many(messages):
    messages.append(messages[-1])


def layers_exchanged(messages):
    messages[1], messages[2] = messages[2], messages[1]


def no_layers(messages):
    messages[1].evidence.layers = 0
    messages[1].evidence.positions.data = b""
    messages[1].evidence.ClearField("signals")


def short_array(messages):
    messages[1].evidence.positions.data = messages[1].evidence.positions.data[:-1]


def long_array(messages):
    messages[1].evidence.positions.data = bytes(1 << 20)


def no_type(messages):
    messages[1].evidence.positions.type = 0


def no_mass(messages):
    del messages[1].evidence.signals["mass"]


def unknown_signal(messages):
    messages[1].evidence.signals["magic"].CopyFrom(messages[1].evidence.signals["mass"])


def not_a_number(messages):
    array = np.frombuffer(messages[1].evidence.signals["mass"].data, dtype="<f4").copy()
    array[3] = np.nan
    messages[1].evidence.signals["mass"].data = array.tobytes()


def positions_twice(messages):
    array = np.frombuffer(messages[1].evidence.positions.data, dtype="<u2").copy()
    array[1] = array[0]
    messages[1].evidence.positions.data = array.tobytes()


def positions_ahead(messages):
    header(messages).step -= 1
    array = np.frombuffer(messages[1].evidence.positions.data, dtype="<u2").copy()
    array.reshape(2, -1)[:, -1] = header(messages).step
    messages[1].evidence.positions.data = array.tobytes()


def lengths_missing(messages):
    del header(messages).layer_lengths[-1]


def length_of_zero(messages):
    header(messages).layer_lengths[0] = 0


def hostile_lengths(messages):
    header(messages).layer_lengths[:] = [2**32 - 1] * 2


def hostile_lengths_and_step(messages):
    header(messages).step = 4 << 20
    header(messages).session.model.kv_heads = 512
    header(messages).layer_lengths[:] = [4 << 20] * 2


def hostile_ahead(messages):
    header(messages).ahead = 2**32 - 1


def no_grant(messages):
    header(messages).session.ClearField("grant")


def bad_id(messages):
    header(messages).session.session_id = "{x}"


def grant_of_another_model(messages):
    header(messages).session.grant.layer_slots.append(200)


def slots_of_a_sliding_layer(messages):
    header(messages).session.model.layer_windows[:] = [0, 8]


def evidence_of_a_sliding_layer(messages):
    slots_of_a_sliding_layer(messages)
    header(messages).layer_lengths[1] = 0


def windows_of_another_model(messages):
    header(messages).session.model.layer_windows[:] = [0, 8, 8]


def window_of_zero(messages):
    header(messages).session.grant.window = 0


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (empty_part, "parts"),
        (missing_layer, "evidence"),
        (layer_too_many, "evidence.layers"),
        (layers_exchanged, "evidence.first_layer"),
        (no_layers, "evidence.first_layer"),
        (short_array, "evidence.positions.data"),
        (long_array, "evidence"),
        (no_type, "evidence.positions.type"),
        (no_mass, "evidence.signals"),
        (unknown_signal, "evidence.signals"),
        (not_a_number, "evidence.signals.mass"),
        (positions_twice, "evidence.positions"),
        (positions_ahead, "evidence.positions"),
        (lengths_missing, "layer_lengths"),
        (length_of_zero, "layer_lengths"),
        (hostile_lengths, "layer_lengths"),
        (hostile_lengths_and_step, "layer_lengths"),
        (hostile_ahead, "ahead"),
        (no_grant, "session.grant"),
        (bad_id, "session.session_id"),
        (grant_of_another_model, "session.grant.layer_slots"),
        (slots_of_a_sliding_layer, "layer_lengths"),
        (evidence_of_a_sliding_layer, "evidence.signals"),
        (windows_of_another_model, "session.model.layer_windows"),
        (window_of_zero, "policy.parameters.window"),
    ],
)
async def test_a_malformed_snapshot_is_refused_by_field_and_alone(manager, connect, spoil, field):
    async with connect(manager) as stub:
        session = await opened(stub, spec("malformed", "scissorhands:counts"))
        evidence = snapshot(session, 1, signals=signals_of("scissorhands:counts"))
        whole = plan_parts(evidence, session)
        parts = [pb.SnapshotPart.FromString(part.SerializeToString()) for part in whole]
        spoil(parts)
        messages = requests_of([*whole, *parts, *whole])
        results = (await stub.PlanEvictions(iter(messages), timeout=30)).results
        assert same_plan(results[0].plan, session, evidence)
        assert same_plan(results[-1].plan, session, evidence)
        assert len(results) == 3
        failure = results[1].failure
        assert (failure.code, failure.field) == (code_pb2.INVALID_ARGUMENT, field)


async def test_a_snapshot_that_another_one_interrupts_fails_alone(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec("interrupted"))
        evidence = snapshot(session, 1)
        parts = plan_parts(evidence, session)
        results = (await stub.PlanEvictions(iter(requests_of([*parts[:-1], *parts])), timeout=30)).results
        assert (len(results), results[0].failure.field) == (2, "evidence")
        assert same_plan(results[1].plan, session, evidence)
