"""Plans over gRPC: equal to local ones, checked, bounded, and independent of what the manager remembers."""

import asyncio

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_status import rpc_status
from support.manager_data import (
    model,
    opened,
    plan_parts,
    planned,
    planned_all,
    requests_of,
    same_plan,
    signals_of,
    snapshot,
    spec,
)
from support.processes import ManagerProcess, wait_for

from scissorhands.plan import plan
from scissorhands.plan_wire import MOST_SNAPSHOTS, plan_requests
from scissorhands.v1 import budget_pb2, cache_manager_pb2
from scissorhands.wire import read_grant

pb = cache_manager_pb2
NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def manager():
    process = ManagerProcess(store_url=NOWHERE)
    yield process
    process.stop()


@pytest.mark.parametrize(
    "policy",
    [
        *("scissorhands", "scissorhands:paper", "h2o", "tova", "snapkv", "streaming"),
        *("r-kv", "fastgen", "expected-attention", "protected:h2o", "protected:tova", "merged:h2o"),
    ],
)
async def test_a_plan_over_grpc_is_the_local_plan(manager, connect, policy):
    async with connect(manager) as stub:
        session = await opened(stub, spec(f"plan-{policy.replace(':', '-')}", policy))
        for epoch in range(3):
            evidence = snapshot(session, epoch, seed=epoch, signals=signals_of(policy))
            response = await planned(stub, session, evidence)
            assert (response.epoch, response.step) == (epoch, evidence.step)
            assert response.compute_time.ToNanoseconds() > 0
            assert same_plan(response, session, evidence)


async def test_full_keeps_everything_and_never_plans_an_eviction(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec("plan-full", "full", budget=budget_pb2.Budget(tokens=1000)))
        evidence = snapshot(session, 1, signals=("mass",))
        (result,) = await planned_all(stub, (evidence, session))
        assert "keeps every token" in result.failure.message


async def test_the_ledger_tells_what_was_evicted(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec("told"))
        first, second = (snapshot(session, epoch, seed=epoch) for epoch in (0, 1))
        for evidence in (first, first, second):
            await planned(stub, session, evidence)
        plans = [plan(read_grant(session.grant), evidence) for evidence in (first, second)]

        async def told():
            return (await stub.GetSession(pb.GetSessionRequest(session_id="told"), timeout=10)).session

        found = await told()
        assert (found.evictions, found.step) == (2, second.step)
        dropped = sum(int((~keep).sum()) for keep in plans[1].keep)
        resident = sum(layer.positions.size for layer in second.layers)
        assert found.resident_slots == resident - dropped
        assert found.evicted_slots == second.step * 4 - resident + dropped
        mass = [
            sum(
                float(layer.signals["mass"][~keep].sum())
                for layer, keep in zip(evidence.layers, made.keep, strict=True)
            )
            for evidence, made in zip((first, second), plans, strict=True)
        ]
        total = mass[0] + sum(float(layer.signals["mass"].sum()) for layer in second.layers)
        assert found.mass_dropped == pytest.approx(sum(mass) / total, rel=1e-5)
        while not found.persistence:  # Measured in the background.
            await asyncio.sleep(0.02)
            found = await told()
        assert len(found.persistence) == 2
        assert all(0 <= value <= 1 for value in found.persistence)


async def test_a_snapshot_of_a_large_model_passes_with_default_limits(start_manager, connect):
    manager = start_manager(store_url=NOWHERE)
    large = model(layers=32, kv_heads=8, head_dim=128, query_heads=32, element_bytes=2)
    async with connect(manager) as stub:
        session = await opened(
            stub, spec("large", model=large, prompt=90_000, budget=budget_pb2.Budget(tokens=8192 + 8))
        )
        evidence = snapshot(session, 9)
        assert (len(evidence.layers), evidence.layers[0].positions.shape) == (32, (8, 8192))
        messages = list(plan_requests([(evidence, session)]))
        assert max(message.ByteSize() for message in messages) < 4 << 20
        assert sum(message.ByteSize() for message in messages) > 16 << 20
        response = await planned(stub, session, evidence, timeout=120)
        assert response.ByteSize() < 4 << 20
        assert same_plan(response, session, evidence)
        parts = [part.evidence for message in messages for part in message.parts]
        sent = sum(len(array.data) for part in parts for array in (part.positions, *part.signals.values()))
        assert manager.metric("snapshot_bytes_total") == sent
        assert manager.metric("plan_compute_seconds_count") == 1


async def test_a_plan_follows_from_the_call_alone(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec("alone"))
        evidence = snapshot(session, 1)
        session.grant.recent, session.grant.drop = 3, 9
        assert same_plan(await planned(stub, session, evidence), session, evidence)
        # A session that was never opened here is recreated by its first call.
        session.session_id = "alone-elsewhere"
        assert same_plan(await planned(stub, session, evidence), session, evidence)
        found = await stub.GetSession(pb.GetSessionRequest(session_id="alone-elsewhere"), timeout=10)
        assert (found.session.spec, found.session.state) == (session, pb.SESSION_STATE_OPEN)
        assert found.session.evictions == 2


async def test_a_manager_that_was_killed_and_started_again_goes_on(start_manager, connect):
    first = start_manager(store_url=NOWHERE)
    async with connect(first) as stub:
        session = await opened(stub, spec("survivor"))
        evidence = snapshot(session, 0)
        before = await planned(stub, session, evidence)
        first.kill()
        start_manager(store_url=NOWHERE, port=first.port)
        requests = plan_requests([(evidence, session)])
        again = await stub.PlanEvictions(requests, timeout=30, wait_for_ready=True)
        assert again.results[0].plan.layers == before.layers
        later = snapshot(session, 1)
        assert same_plan(await planned(stub, session, later), session, later)
        found = await stub.GetSession(pb.GetSessionRequest(session_id="survivor"), timeout=10)
        assert found.session.evictions == 2


async def test_plans_go_on_while_the_ledger_is_full(start_manager, connect):
    manager = start_manager(store_url=NOWHERE, max_sessions=1)
    async with connect(manager) as stub:
        session = await opened(stub, spec("only"))
        session.session_id = "other"
        evidence = snapshot(session, 0)
        assert same_plan(await planned(stub, session, evidence), session, evidence)


async def test_a_late_plan_of_a_closed_session_does_not_open_it_again(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec("late"))
        await stub.CloseSession(pb.CloseSessionRequest(session_id="late"), timeout=10)
        evidence = snapshot(session, 0)
        assert same_plan(await planned(stub, session, evidence), session, evidence)
        found = await stub.GetSession(pb.GetSessionRequest(session_id="late"), timeout=10)
        assert (found.session.state, found.session.evictions) == (pb.SESSION_STATE_CLOSED, 0)


@pytest.mark.parametrize("count", [0, MOST_SNAPSHOTS + 1])
async def test_calls_without_a_header_or_with_too_many_are_refused(manager, connect, count):
    async with connect(manager) as stub:
        session = await opened(stub, spec("parts"))
        parts = plan_parts(snapshot(session, 1), session)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PlanEvictions(iter(requests_of(parts * count or parts[1:])), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in rpc_status.from_call(caught.value).details)
        assert bad.field_violations[0].field == "parts"


async def test_an_empty_stream_is_refused(manager, connect):
    async with connect(manager) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PlanEvictions(iter([]), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_falls_silent_is_let_go_and_frees_its_place(start_manager, connect):
    manager = start_manager(store_url=NOWHERE, stream_timeout=0.3, max_plans=1)
    async with connect(manager) as stub:
        session = await opened(stub, spec("silent"))
        evidence = snapshot(session, 1)
        messages = requests_of(plan_parts(evidence, session))
        silent = asyncio.Event()

        async def then_silence():
            yield messages[0]
            await silent.wait()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PlanEvictions(then_silence(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert same_plan(await planned(stub, session, evidence), session, evidence)


async def test_plans_beyond_the_bound_are_turned_away_and_cancelled_ones_free_their_place(start_manager, connect):
    manager = start_manager(store_url=NOWHERE, max_plans=2)
    async with connect(manager) as stub:
        session = await opened(stub, spec("busy"))
        evidence = snapshot(session, 1)
        messages = requests_of(plan_parts(evidence, session))
        never = asyncio.Event()

        async def half():
            yield messages[0]
            yield messages[1]
            await never.wait()

        holding = [asyncio.ensure_future(stub.PlanEvictions(half(), timeout=60)) for _ in range(2)]

        async def turned_away():
            try:
                await planned(stub, session, evidence)
            except grpc.aio.AioRpcError as error:
                return error
            return None

        while (error := await turned_away()) is None:
            await asyncio.sleep(0.01)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
        assert manager.metric('plans_total{result="shed"}') >= 1
        for call in holding:
            call.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        wait_for(lambda: manager.metric('plans_total{result="cancelled"}') == 2, "the cancelled plans")
        assert same_plan(await planned(stub, session, evidence), session, evidence)


async def test_many_plans_at_once_are_all_right(manager, connect):
    async with connect(manager) as stub:
        sessions = [await opened(stub, spec(f"many-{index}")) for index in range(16)]
        evidence = [snapshot(session, 1, seed=index) for index, session in enumerate(sessions)]
        calls = [planned(stub, session, given) for given, session in zip(evidence, sessions, strict=True)]
        assert all(map(same_plan, await asyncio.gather(*calls), sessions, evidence))


async def test_snapshots_of_many_rows_in_one_call_are_each_answered(start_manager, connect):
    manager = start_manager(store_url=NOWHERE)
    async with connect(manager) as stub:
        sessions = [await opened(stub, spec(f"row-{index}")) for index in range(MOST_SNAPSHOTS)]
        pairs = [(snapshot(session, 1, seed=index), session) for index, session in enumerate(sessions)]
        results = await planned_all(stub, *pairs)
        assert len(results) == MOST_SNAPSHOTS
        assert all(
            same_plan(result.plan, session, given) for result, (given, session) in zip(results, pairs, strict=True)
        )
        assert manager.metric("plan_batch_snapshots_sum") == MOST_SNAPSHOTS
        assert manager.metric("plan_batch_snapshots_count") == 1
        assert manager.metric('plans_total{result="computed"}') == MOST_SNAPSHOTS


async def test_a_flood_is_turned_away_in_part_and_then_all_is_well(start_manager, connect):
    manager = start_manager(store_url=NOWHERE, max_plans=4)
    async with connect(manager) as stub:
        session = await opened(stub, spec("flood", budget=budget_pb2.Budget(tokens=800), prompt=5000))
        evidence = snapshot(session, 1)

        async def one():
            try:
                return same_plan(await planned(stub, session, evidence), session, evidence)
            except grpc.aio.AioRpcError as error:
                return error.code()

        answers = await asyncio.gather(*(one() for _ in range(200)))
        assert set(answers) == {True, grpc.StatusCode.RESOURCE_EXHAUSTED}
        shed = answers.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert manager.metric('plans_total{result="computed"}') == len(answers) - shed
        assert manager.metric('plans_total{result="shed"}') == shed
        assert manager.metric('plans_shed_total{reason="bound"}') == shed
        # Sixteen in one call are more than there is room for: those that fit are answered.
        results = await planned_all(stub, *[(evidence, session)] * MOST_SNAPSHOTS)
        assert [same_plan(result.plan, session, evidence) for result in results[:4]] == [True] * 4
        assert {result.failure.code for result in results[4:]} == {code_pb2.RESOURCE_EXHAUSTED}
        assert same_plan(await planned(stub, session, evidence), session, evidence)
