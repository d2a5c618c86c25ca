"""Tenants meet nowhere: not in sessions, nor in what is stored, nor in lists, nor in what answers take."""

import asyncio
import hashlib
from contextlib import asynccontextmanager

import grpc
import pytest
import redis
from support.tiny_worker import settings, tiny_loaded
from support.waiting import until

from scissorhands.credentials import Credentials
from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc, suspension_pb2
from scissorhands_client import AsyncClient, AsyncManagerClient, Budget, GenerateOptions, NotFoundError, TokenIds
from scissorhands_server.worker.server import Worker

PROMPT = [3 + 7 * place % 250 for place in range(100)]
OPTIONS = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
WHO = {"acme": "client", "rival": "client", "servers": "worker", "us": "operator"}


@pytest.fixture
def tokens(tmp_path):
    """Return credentials of two tenants, of the worker and of an operator, and the servers' file."""
    found, entries = {}, []
    for tenant, role in WHO.items():
        path = tmp_path / tenant
        path.write_text(f"a-token-of-{tenant}-that-is-long")
        found[tenant] = Credentials(token_file=path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append(f'[[token]]\nsha256 = "{digest}"\ntenant = "{tenant}"\nrole = "{role}"\n')
    file = tmp_path / "tokens.toml"
    file.write_text("\n".join(entries))
    return found, file


@asynccontextmanager
async def system(tokens, redis_server, start_manager, **given):
    """Run a manager and a worker; yield the manager and a function that returns a tenant's client."""
    credentials, file = tokens
    given = {"janitor_interval": 3600.0, **given}
    manager = start_manager(store_url=redis_server.url, tokens_file=file, **given)
    worker_settings = settings(
        manager=manager.address,
        tokens_file=file,
        manager_token_file=credentials["servers"].token_file,
        prefix_tokens=16,
        prefix_advantage=0.0,
    )
    async with Worker(worker_settings, tiny_loaded()) as worker:
        await until(lambda: worker._link.up, "the manager")
        yield manager, lambda tenant: AsyncClient(f"127.0.0.1:{worker.port}", credentials=credentials[tenant])


async def told(client, prompt, session_id=""):
    options = GenerateOptions(**OPTIONS, session_id=session_id, budget=Budget.fraction(0.5))
    return await client.generate(TokenIds(prompt), options).result()


async def listed(manager, shown):
    async with AsyncManagerClient(manager.address, credentials=shown) as client:
        return sorted([session.session_id async for session in client.list_sessions()])


async def delete(manager, shown, name):
    async with AsyncManagerClient(manager.address, credentials=shown) as client:
        await client.delete_session(name)


async def test_each_goes_on_with_its_own(redis_server, start_manager, tokens):
    credentials, _ = tokens
    async with (
        system(tokens, redis_server, start_manager) as (manager, connect),
        connect("acme") as acme,
        connect("rival") as rival,
    ):
        first = await told(acme, PROMPT, "chat")
        assert first.accepted.session_id == "chat"
        # Its prefixes are there for its other requests.
        while not (await told(acme, PROMPT, "other")).finish.usage.prefix_tokens:
            await delete(manager, credentials["acme"], "other")
        # The same id and the same prompt: neither the session nor its prefixes are the other's.
        other = await told(rival, PROMPT, "chat")
        assert (other.accepted.resumed_tokens, other.finish.usage.prefix_tokens) == (0, 0)
        assert other.token_ids == first.token_ids
        again = await told(acme, [*PROMPT, *first.token_ids, 5, 6], "chat")
        assert again.accepted.resumed_tokens > 0
        await told(rival, PROMPT, "only-mine")
        assert await listed(manager, credentials["acme"]) == ["chat", "other"]
        assert await listed(manager, credentials["rival"]) == ["chat", "only-mine"]
        assert await listed(manager, credentials["us"]) == [
            "acme/chat", "acme/other", "rival/chat", "rival/only-mine"
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["only-mine", "rival/only-mine", "never-was"])
async def test_what_is_anothers_is_not_there(redis_server, start_manager, tokens, name):
    credentials, _ = tokens
    async with system(tokens, redis_server, start_manager) as (manager, connect), connect("rival") as rival:
        await told(rival, PROMPT, "only-mine")
        store = redis.Redis.from_url(redis_server.url)
        channel = credentials["acme"].channel(manager.address, ())
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        asked = (
            (stub.GetSession, cache_manager_pb2.GetSessionRequest(session_id=name)),
            (stub.FetchSegments, cache_manager_pb2.FetchSegmentsRequest(session_id=name)),
        )
        for method, request in asked:
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(lambda method=method, request=request: list_of(method(request, timeout=30)))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert "rival" not in caught.value.details().replace(name, "")
        deleted = await asyncio.to_thread(
            stub.DeleteSession, suspension_pb2.DeleteSessionRequest(session_id="only-mine")
        )
        assert deleted.deleted == 0
        channel.close()
        store.close()
        async with AsyncManagerClient(manager.address, credentials=credentials["rival"]) as client:
            session = await client.get_session("only-mine")
            assert (session.session_id, session.suspended is not None) == ("only-mine", True)


def list_of(answer):
    """Read a stream; a single response is one that has come."""
    return list(answer) if isinstance(answer, grpc.Call) else answer


async def test_all_other_calls_are_closed_to_a_client(redis_server, start_manager, tokens):
    credentials, _ = tokens
    open_ = {"GetSession", "ListSessions", "FetchSegments", "DeleteSession"}
    async with system(tokens, redis_server, start_manager) as (manager, connect), connect("rival") as rival:
        await told(rival, PROMPT, "only-mine")
        channel = credentials["acme"].channel(manager.address, ())
        service = cache_manager_pb2.DESCRIPTOR.services_by_name["CacheManagerService"]
        for method in service.methods:
            if method.name in open_:
                continue
            field = method.input_type.fields_by_name.get("session_id")
            request = b"\x0a\x09only-mine" if field is not None and field.number == 1 else b""
            call = channel.stream_stream(f"/{service.full_name}/{method.name}")
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(lambda call=call, request=request: list(call(iter([request]), timeout=30)))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, method.name
        channel.close()


async def test_the_store_is_asked_the_same_for_what_is_anothers_and_for_what_is_nobodys(
    redis_server, start_manager, tokens
):
    """So the time that an answer takes does not tell them apart."""
    credentials, _ = tokens
    async with system(tokens, redis_server, start_manager) as (manager, connect), connect("rival") as rival:
        await told(rival, PROMPT, "only-mine")
        store = redis.Redis.from_url(redis_server.url)

        async def commands(name):
            store.config_resetstat()
            async with AsyncManagerClient(manager.address, credentials=credentials["acme"]) as client:
                with pytest.raises(NotFoundError):
                    await client.get_session(name)
            found = store.info("commandstats")
            return {key: each["calls"] for key, each in found.items() if key not in BESIDE}

        assert await commands("only-mine") == await commands("never-was") != {}
        store.close()


# What runs by itself, or is this test's own.
BESIDE = {"cmdstat_ping", "cmdstat_info", "cmdstat_config|resetstat", "cmdstat_client|setinfo", "cmdstat_hello"}


async def test_an_operator_names_tenants(redis_server, start_manager, tokens):
    credentials, _ = tokens
    async with system(tokens, redis_server, start_manager) as (manager, connect), connect("acme") as acme:
        await told(acme, PROMPT, "chat")
        async with AsyncManagerClient(manager.address, credentials=credentials["us"]) as client:
            assert (await client.get_session("acme/chat")).session_id == "acme/chat"
            with pytest.raises(NotFoundError):
                await client.get_session("chat")
            totals = {(total.tenant, total.kind): total.objects for total in (await client.get_store()).totals}
            assert totals["acme", "row"] == 1
            assert totals["default", "row"] == 0
            assert [found.error async for found in client.verify_store()] == [""] * sum(totals.values())
            assert await client.delete_session("acme/chat") > 0
            assert await listed(manager, credentials["acme"]) in ([], ["chat"])


async def test_the_janitor_looks_after_all_tenants(redis_server, start_manager, tokens):
    credentials, _ = tokens
    async with system(tokens, redis_server, start_manager) as (manager, connect), connect("acme") as acme:
        await told(acme, PROMPT, "chat")
        async with AsyncManagerClient(manager.address, credentials=credentials["us"]) as client:
            before = {(total.tenant, total.kind): total for total in (await client.get_store()).totals}
            store = redis.Redis.from_url(redis_server.url)
            # The registry and the list of tenants are lost, as under allkeys-lru.
            store.delete(*[key for key in store.keys("*") if b"registry" in key])
            store.close()
            assert {total.tenant for total in (await client.get_store()).totals} == {"default"}
            found = {item.what async for item in client.collect_garbage()}
            assert "found_object" in found
            assert {(total.tenant, total.kind): total for total in (await client.get_store()).totals} == before
