"""Servers that ask who calls: every method, every role, over real connections."""

import asyncio
import hashlib

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.tiny_worker import metrics, settings, tiny_loaded
from support.waiting import SECONDS, until

from scissorhands.credentials import Credentials
from scissorhands.v1 import cache_manager_pb2, generation_pb2
from scissorhands_client import (
    AccessDeniedError,
    AsyncClient,
    AsyncManagerClient,
    GenerateOptions,
    ManagerClient,
)
from scissorhands_client.commands.store import store
from scissorhands_server.healthcheck import main as healthcheck
from scissorhands_server.manager.server import ROLES_OF_METHODS
from scissorhands_server.worker.server import Worker

OPTIONS = GenerateOptions(max_new_tokens=8, ignore_eos=True)
ROLES = ("client", "worker", "operator")
SERVICES = {
    "manager": cache_manager_pb2.DESCRIPTOR.services_by_name["CacheManagerService"],
    "worker": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
}


@pytest.fixture
def callers(tmp_path):
    """Return credentials by role, those of nobody, and the servers' file."""
    entries = []
    found = {}
    for role in (*ROLES, "nobody"):
        path = tmp_path / role
        path.write_text(f"the-token-of-the-{role}-is-long\n")
        found[role] = Credentials(token_file=path)
        if role != "nobody":
            digest = hashlib.sha256(path.read_text().strip().encode()).hexdigest()
            entries.append(f'[[token]]\nsha256 = "{digest}"\ntenant = "acme"\nrole = "{role}"\n')
    file = tmp_path / "tokens.toml"
    file.write_text("\n".join(entries))
    return found | {None: Credentials()}, file


def code_of(channel, service, method):
    """Call any method with an empty request, and return how that ends.

    Not over asyncio, where gRPC may say INTERNAL for a stream of requests whose answer comes before them.
    """
    path = f"/{service.full_name}/{method.name}"
    stream = channel.stream_stream(path) if method.client_streaming else channel.unary_stream(path)
    try:
        call = stream(iter(()) if method.client_streaming else b"", timeout=SECONDS)
        list(call)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("server", SERVICES)
async def test_every_method_is_closed_to_those_who_may_not_call_it(redis_server, start_manager, callers, server):
    credentials, file = callers
    manager = start_manager(store_url=redis_server.url, tokens_file=file)
    async with Worker(settings(tokens_file=file), tiny_loaded()) as worker:
        address = manager.address if server == "manager" else f"127.0.0.1:{worker.port}"
        for caller, shown in credentials.items():
            channel = shown.channel(address, ())
            for method in SERVICES[server].methods:
                code = await asyncio.to_thread(code_of, channel, SERVICES[server], method)
                usual = [{"manager": "worker", "worker": "client"}[server]]
                allowed = ("operator", *ROLES_OF_METHODS.get(method.name, usual))
                if caller in (None, "nobody"):
                    assert code is grpc.StatusCode.UNAUTHENTICATED, (caller, method.name)
                elif caller in allowed:
                    assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED), method.name
                else:
                    assert code is grpc.StatusCode.PERMISSION_DENIED, (caller, method.name)
            # Health is for everybody, who calls or only looks.
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await asyncio.to_thread(check, health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            channel.close()


async def test_a_worker_with_its_own_token_serves_a_client_with_his(redis_server, start_manager, callers):
    credentials, file = callers
    manager = start_manager(store_url=redis_server.url, tokens_file=file)
    given = {"manager": manager.address, "tokens_file": file, "manager_token_file": credentials["worker"].token_file}
    async with Worker(settings(**given), tiny_loaded()) as worker:
        await until(lambda: worker._link.up, "the manager")
        address = f"127.0.0.1:{worker.port}"
        async with AsyncClient(address, credentials=credentials["client"]) as client:
            result = await client.generate("Once upon a time", OPTIONS).result()
            assert len(result.token_ids) == 8
        async with AsyncClient(address) as client:
            with pytest.raises(AccessDeniedError, match=r"give token_file \(--token-file\)"):
                await client.get_model()
        async with AsyncManagerClient(manager.address, credentials=credentials["operator"]) as client:
            assert len([each async for each in client.list_sessions()]) == 1
    client = ManagerClient(manager.address, credentials=credentials["client"])
    with client, pytest.raises(AccessDeniedError, match="GetStore needs a token of the role operator, not client"):
        client.get_store()
    assert manager.metric('grpc_requests_total{code="PERMISSION_DENIED",method="GetStore"}') == 1


async def test_a_worker_without_a_token_says_so_and_plans_by_itself(redis_server, start_manager, callers, caplog):
    _, file = callers
    manager = start_manager(store_url=redis_server.url, tokens_file=file)
    async with Worker(settings(manager=manager.address), tiny_loaded()) as worker:
        await until(lambda: worker._link.up, "the manager")
        async with AsyncClient(f"127.0.0.1:{worker.port}") as client:
            assert len((await client.generate("Once upon a time", OPTIONS).result()).token_ids) == 8
        assert metrics(worker)['scissorhands_worker_manager_errors_total{reason="refused"}'] >= 1
    assert "give manager_token_file" in caplog.text


def test_commands_take_the_token_from_a_file(redis_server, start_manager, callers):
    credentials, file = callers
    manager = start_manager(store_url=redis_server.url, tokens_file=file)
    command = ["stat", "--manager", manager.address]
    told = CliRunner().invoke(store, command)
    assert told.exit_code == 1
    assert "--token-file" in told.output
    told = CliRunner().invoke(store, [*command, "--token-file", str(credentials["worker"].token_file)])
    assert "GetStore needs a token of the role operator, not worker" in " ".join(told.output.split())
    variables = {"SCISSORHANDS_CLIENT_TOKEN_FILE": str(credentials["operator"].token_file)}
    assert CliRunner().invoke(store, command, env=variables).exit_code == 0
    assert CliRunner().invoke(healthcheck, [manager.address], env=variables).output == "SERVING\n"


async def test_reflection_is_closed_without_a_token_and_can_be_switched_off(callers):
    credentials, file = callers

    def services(channel):
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        try:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=SECONDS))
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def asked(shown, **given):
        async with Worker(settings(**given), tiny_loaded()) as worker:
            channel = shown.channel(f"127.0.0.1:{worker.port}", ())
            code = await asyncio.to_thread(services, channel)
            channel.close()
        return code

    assert await asked(Credentials()) is grpc.StatusCode.OK
    assert await asked(Credentials(), reflection=False) is grpc.StatusCode.UNIMPLEMENTED
    assert await asked(Credentials(), tokens_file=file) is grpc.StatusCode.UNAUTHENTICATED
    assert await asked(credentials["client"], tokens_file=file) is grpc.StatusCode.OK
