"""Sessions of a manager process: grants, bad input, leases, ends and lists."""

import asyncio
import math
import subprocess
import sys

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from support.manager_data import model, opened, spec
from support.processes import ManagerProcess, samples, wait_for

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant
from scissorhands.v1 import budget_pb2, cache_manager_pb2, quality_pb2
from scissorhands.wire import read_grant

pb = cache_manager_pb2
SHAPE = ModelShape(2, 2, 8, 4)
COMMAND = [sys.executable, "-m", "scissorhands", "manager"]


@pytest.fixture(scope="module")
def manager():
    """One manager for all tests that leave it as it was."""
    process = ManagerProcess(store_url="redis://127.0.0.1:1/0")
    yield process
    process.stop()


async def refused(call, code=grpc.StatusCode.INVALID_ARGUMENT):
    """Return the field that a call was refused for."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value.details()
    for detail in rpc_status.from_call(caught.value).details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return bad.field_violations[0].field
        info = error_details_pb2.ErrorInfo()
        if code is grpc.StatusCode.NOT_FOUND and detail.Unpack(info):
            return info.metadata["field"]
    return None


def open_call(stub, message):
    return stub.OpenSession(pb.OpenSessionRequest(session=message), timeout=10)


def split(values):
    """Return what the process takes, as every client library of Prometheus tells it, and everything else."""
    own = {name: value for name, value in values.items() if name.startswith("process_")}
    return own, {name: value for name, value in values.items() if name not in own}


async def test_everything_is_at_zero_at_the_start_and_promtool_agrees():
    process = ManagerProcess(store_url="redis://127.0.0.1:1/0")
    try:
        text = process.scrape()
        process_, values = split(samples(text))
        assert process_["process_resident_memory_bytes"] > 0
        # Nothing is there, and the breaker may have opened already.
        kinds = ("store_operation", "store_errors", "store_breaker_open")
        store = [name for name in values if any(kind in name for kind in kinds)]
        assert store  # The look for the store has been counted.
        left = {name: value for name, value in values.items() if name not in store}
        assert len(left) > 100
        # Without TLS no certificate ever ends.
        assert {name: value for name, value in left.items() if value} == {
            "scissorhands_manager_certificate_left_seconds": math.inf
        }
        assert all(name.startswith("scissorhands_manager_") for name in values)
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    finally:
        process.stop()


async def test_a_grant_is_what_the_core_grants(manager, connect):
    async with connect(manager) as stub:
        for index, (budget, policy, asked) in enumerate(
            [
                (None, "", BudgetRequest.fraction(0.2)),
                (budget_pb2.Budget(tokens=128), "h2o", BudgetRequest.tokens(128)),
                (budget_pb2.Budget(bytes=40_000), "streaming", BudgetRequest.bytes(40_000)),
                (budget_pb2.Budget(fraction=0.001), "scissorhands:paper", BudgetRequest.fraction(0.001)),
                (budget_pb2.Budget(tokens=5000), "full", BudgetRequest.tokens(5000)),
                (None, "full", BudgetRequest.tokens(1000)),
            ]
        ):
            message = spec(f"grant-{index}", policy)
            if budget:
                message.budget.CopyFrom(budget)
            response = await open_call(stub, message)
            name, _, preset = (policy or "scissorhands").partition(":")
            assert read_grant(response.grant) == grant(asked, PolicyRequest(name, preset), SHAPE, 1000)
            assert response.grant.source == budget_pb2.GRANT_SOURCE_MANAGER
            assert response.grant.codec == "int4"
            assert response.grant.lease.seconds == 30
            await stub.CloseSession(pb.CloseSessionRequest(session_id=f"grant-{index}"), timeout=10)


async def test_parameters_are_overridden_without_a_policy_too(manager, connect):
    message = spec("overridden")
    message.policy.parameters["recent"] = 7
    async with connect(manager) as stub:
        response = await open_call(stub, message)
    assert (response.grant.policy, response.grant.recent) == ("scissorhands", 7)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (spec(""), "session.session_id"),
        (spec("a" * 65), "session.session_id"),
        (spec("A/b"), "session.session_id"),
        (spec("a\n"), "session.session_id"),
        (spec(model=model(layers=0)), "session.model.layers"),
        (spec(model=model(layers=100_000)), "session.model.layers"),
        (spec(model=model(kv_heads=0)), "session.model.kv_heads"),
        (spec(model=model(kv_heads=2**32 - 1)), "session.model.kv_heads"),
        (spec(model=model(head_dim=1 << 20)), "session.model.head_dim"),
        (spec(model=model(element_bytes=17)), "session.model.element_bytes"),
        (spec(model=model(name="x" * 1000)), "session.model.name"),
        (spec(model=model(fingerprint="x" * 1000)), "session.model.fingerprint"),
        (spec(prompt=0), "session.prompt_tokens"),
        (spec(prompt=2**32 - 1), "session.prompt_tokens"),
        (spec(prompt=90_000, new=10_001), "session.max_new_tokens"),
        (spec(grant=budget_pb2.Grant(policy="h2o")), "session.grant"),
        (spec(policy="lru"), "policy.name"),
        (spec(policy="h2o:paper"), "policy.preset"),
        (spec(budget=budget_pb2.Budget()), "budget.amount"),
        (spec(budget=budget_pb2.Budget(tokens=3)), "budget.tokens"),
        (spec(budget=budget_pb2.Budget(bytes=10)), "budget.bytes"),
        (spec(budget=budget_pb2.Budget(fraction=1.5)), "budget.fraction"),
        (spec(budget=budget_pb2.Budget(fraction=float("nan"))), "budget.fraction"),
        (spec(policy="full", budget=budget_pb2.Budget(tokens=999)), "budget"),
        (spec(policy="scissorhands:counts", prompt=1000), None),
    ],
)
async def test_bad_sessions_are_refused_by_field(manager, connect, message, field):
    async with connect(manager) as stub:
        if field is None:
            message.policy.parameters["window"] = 0
            field = "policy.parameters.window"
        before = manager.metric('grants_total{result="refused"}')
        assert await refused(open_call(stub, message)) == field
        assert manager.metric('grants_total{result="refused"}') == before + 1


async def test_the_smallest_budget_is_told_and_is_enough(manager, connect):
    async with connect(manager) as stub:
        message = spec("smallest", "h2o", budget=budget_pb2.Budget(tokens=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await open_call(stub, message)
        infos = [error_details_pb2.ErrorInfo() for _ in rpc_status.from_call(caught.value).details]
        found = [i for i, any_ in zip(infos, rpc_status.from_call(caught.value).details, strict=True) if any_.Unpack(i)]
        smallest = int(found[0].metadata["smallest_slots"])
        message.budget.tokens = smallest - 1
        assert await refused(open_call(stub, message)) == "budget.tokens"
        message.budget.tokens = smallest
        assert list((await open_call(stub, message)).grant.layer_slots) == [smallest] * 2


async def test_opening_twice_is_the_same_and_opening_another_is_refused(manager, connect):
    async with connect(manager) as stub:
        first = await open_call(stub, spec("twice"))
        assert await open_call(stub, spec("twice")) == first
        assert await refused(open_call(stub, spec("twice", prompt=901))) == "session.session_id"
        await stub.CloseSession(pb.CloseSessionRequest(session_id="twice"), timeout=10)
        assert await refused(open_call(stub, spec("twice"))) == "session.session_id"


async def test_a_session_is_opened_listed_closed_and_closed_again(manager, connect):
    async with connect(manager) as stub:
        await opened(stub, spec("life"))
        session = (await stub.GetSession(pb.GetSessionRequest(session_id="life"), timeout=10)).session
        assert session.state == pb.SESSION_STATE_OPEN
        assert session.lease_end_time.ToNanoseconds() - session.open_time.ToNanoseconds() == 30 * 10**9
        assert session.spec.grant.policy == "scissorhands"
        for _ in range(2):
            closed = await stub.CloseSession(pb.CloseSessionRequest(session_id="life"), timeout=10)
            assert closed.session.state == pb.SESSION_STATE_CLOSED


@pytest.mark.parametrize(
    ("quality", "field"),
    [
        ({"recent_mass_dropped": 1.5}, "quality.recent_mass_dropped"),
        ({"persistence": float("nan")}, "quality.persistence"),
        ({"divergence": {"same_share": -0.1}}, "quality.divergence.same_share"),
        ({"divergence": {"nats": float("inf")}}, "quality.divergence.nats"),
    ],
)
async def test_a_report_of_quality_that_cannot_be_is_refused(manager, connect, quality, field):
    closing = pb.CloseSessionRequest(session_id="reported", quality=quality)
    async with connect(manager) as stub:
        assert await refused(stub.CloseSession(closing, timeout=10)) == field


async def test_the_quality_of_a_session_is_what_its_worker_reported_last(manager, connect):
    async with connect(manager) as stub:
        await opened(stub, spec("reported"))
        session = (await stub.GetSession(pb.GetSessionRequest(session_id="reported"), timeout=10)).session
        assert not session.HasField("quality")
        quality = quality_pb2.Quality(persistence=0.75, divergence=quality_pb2.Divergence(tokens=3, nats=0.5))
        for told in (quality, None):  # A repeated end may come from somebody who cannot tell.
            closing = pb.CloseSessionRequest(session_id="reported", quality=told)
            assert (await stub.CloseSession(closing, timeout=10)).session.quality == quality


@pytest.mark.parametrize("method", ["GetSession", "CloseSession"])
async def test_unknown_and_malformed_ids(manager, connect, method):
    async with connect(manager) as stub:
        request = {"GetSession": pb.GetSessionRequest, "CloseSession": pb.CloseSessionRequest}[method]
        call = getattr(stub, method)
        missing = await refused(call(request(session_id="nobody"), timeout=10), grpc.StatusCode.NOT_FOUND)
        assert missing == "session_id"
        assert await refused(call(request(session_id="No/body"), timeout=10)) == "session_id"


async def test_pages_of_sessions(start_manager, connect):
    manager = start_manager(store_url="redis://127.0.0.1:1/0")
    async with connect(manager) as stub:
        for index in range(5):
            await opened(stub, spec(f"s{index}"))
        await stub.CloseSession(pb.CloseSessionRequest(session_id="s3"), timeout=10)
        seen, token = [], ""
        while True:
            page = await stub.ListSessions(pb.ListSessionsRequest(page_size=2, page_token=token), timeout=10)
            seen += [session.spec.session_id for session in page.sessions]
            token = page.next_page_token
            if not token:
                break
        assert seen == ["s4", "s3", "s2", "s1", "s0"]
        closed = await stub.ListSessions(pb.ListSessionsRequest(state=pb.SESSION_STATE_CLOSED), timeout=10)
        assert [session.spec.session_id for session in closed.sessions] == ["s3"]
        for bad, field in (
            ({"page_size": 1001}, "page_size"),
            ({"page_token": "x"}, "page_token"),
            ({"state": 9}, "state"),
        ):
            assert await refused(stub.ListSessions(pb.ListSessionsRequest(**bad), timeout=10)) == field


async def test_a_full_ledger_turns_away_with_retry_info(start_manager, connect):
    manager = start_manager(store_url="redis://127.0.0.1:1/0", max_sessions=2)
    async with connect(manager) as stub:
        await opened(stub, spec("a"))
        await opened(stub, spec("b"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await open_call(stub, spec("c"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(caught.value).details)
        assert retry.retry_delay.ToSeconds() > 0
        assert manager.metric('grants_total{result="full"}') == 1
        await stub.CloseSession(pb.CloseSessionRequest(session_id="a"), timeout=10)
        await opened(stub, spec("c"))


async def test_leases_expire_and_are_kept_alive_by_renewing(start_manager, connect):
    manager = start_manager(store_url="redis://127.0.0.1:1/0", lease=1, retention=1)
    async with connect(manager) as stub:
        await opened(stub, spec("left"))
        kept = await opened(stub, spec("kept"))

        async def state(name):
            return (await stub.GetSession(pb.GetSessionRequest(session_id=name), timeout=10)).session.state

        renewed = pb.RenewSessionsRequest(sessions=[kept])
        states = [await state("left")]
        while states[-1] == pb.SESSION_STATE_OPEN:
            assert (await stub.RenewSessions(renewed, timeout=10)).session_ids == ["kept"]
            await asyncio.sleep(0.1)
            states.append(await state("left"))
        assert states[-1] == pb.SESSION_STATE_EXPIRED
        assert await state("kept") == pb.SESSION_STATE_OPEN
        # Both are forgotten when nobody renews.
        wait_for(lambda: manager.metric('sessions{state="open"}') == 0, "the lease to end")

        async def until_it_fails():
            while True:
                await state("kept")
                await asyncio.sleep(0.1)

        assert await refused(until_it_fails(), grpc.StatusCode.NOT_FOUND) == "session_id"


async def test_renewing_recreates_what_a_restarted_manager_does_not_know(manager, connect):
    async with connect(manager) as stub:
        sessions = [await opened(stub, spec(f"renew-{index}")) for index in range(3)]
        for session in sessions:
            session.session_id += "-elsewhere"
        response = await stub.RenewSessions(pb.RenewSessionsRequest(sessions=sessions), timeout=10)
        assert list(response.session_ids) == [session.session_id for session in sessions]
        found = await stub.GetSession(pb.GetSessionRequest(session_id=sessions[1].session_id), timeout=10)
        assert found.session.spec == sessions[1]
        await stub.CloseSession(pb.CloseSessionRequest(session_id=sessions[1].session_id), timeout=10)
        response = await stub.RenewSessions(pb.RenewSessionsRequest(sessions=sessions), timeout=10)
        assert list(response.session_ids) == [sessions[0].session_id, sessions[2].session_id]


async def test_bad_renewals_are_refused(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec("renewal"))
        bare = spec("renewal")
        wrong_layers = pb.SessionSpec.FromString(session.SerializeToString())
        wrong_layers.grant.layer_slots.append(3)
        no_drop = pb.SessionSpec.FromString(session.SerializeToString())
        no_drop.grant.drop = 0
        unknown = pb.SessionSpec.FromString(session.SerializeToString())
        unknown.grant.policy = "lru"
        for sessions, field in (
            ([bare], "session.grant"),
            ([wrong_layers], "session.grant.layer_slots"),
            ([no_drop], "session.grant.drop"),
            ([unknown], "policy.name"),
            ([session] * 1025, "sessions"),
        ):
            assert await refused(stub.RenewSessions(pb.RenewSessionsRequest(sessions=sessions), timeout=10)) == field
        # One that is malformed costs the others nothing.
        mixed = pb.RenewSessionsRequest(sessions=[unknown, session])
        assert (await stub.RenewSessions(mixed, timeout=10)).session_ids == ["renewal"]


async def test_health_is_serving_without_a_store(manager):
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "scissorhands.v1.CacheManagerService"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert manager.metric("store_up") == 0


async def test_reflection_lists_and_describes_the_service(manager):
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="scissorhands.v1.CacheManagerService"),
        ]
        listed, described = [reply async for reply in stub.ServerReflectionInfo(iter(requests), timeout=10)]
        names = {service.name for service in listed.list_services_response.service}
        assert {"scissorhands.v1.CacheManagerService", "grpc.health.v1.Health"} <= names
        assert b"PlanEvictions" in b"".join(described.file_descriptor_response.file_descriptor_proto)


async def test_every_call_is_counted_by_method_and_code(start_manager, connect):
    manager = start_manager(store_url="redis://127.0.0.1:1/0")
    async with connect(manager) as stub:
        await opened(stub, spec("counted"))
        await refused(open_call(stub, spec("")))
        await refused(stub.GetSession(pb.GetSessionRequest(session_id="x"), timeout=10), grpc.StatusCode.NOT_FOUND)
    assert manager.metric('grpc_requests_total{code="OK",method="OpenSession"}') == 1
    assert manager.metric('grpc_requests_total{code="INVALID_ARGUMENT",method="OpenSession"}') == 1
    assert manager.metric('grpc_requests_total{code="NOT_FOUND",method="GetSession"}') == 1
    assert manager.metric('sessions{state="open"}') == 1


def test_a_manager_stops_cleanly_on_sigterm(start_manager):
    assert start_manager(store_url="redis://127.0.0.1:1/0").terminate() == 0


def test_a_taken_port_is_an_error_that_says_so(manager):
    done = subprocess.run(
        [*COMMAND, "--port", str(manager.port), "--metrics-port", "0", "--store-url", "redis://127.0.0.1:1/0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{manager.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_of_the_manager_imports_torch_or_transformers():
    code = (
        "import sys, scissorhands_server.manager.command; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
