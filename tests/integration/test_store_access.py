"""Stores that ask who is there: TLS with certificates on both sides, and ACL users."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.certificates import Certificates
from support.processes import RedisProcess, free_port, wait_for
from support.redis_groups import documented_rules
from support.suspended_data import resume, suspend

from scissorhands.errors import StoreUnavailableError
from scissorhands.suspended import cut
from scissorhands_server.doctor.finding import Status
from scissorhands_server.doctor.store import check_store
from scissorhands_server.store.address import Access
from scissorhands_server.store.redis import RedisStore

PIECES = cut(memoryview(b"x" * 5000))


async def trouble(url, access=None):
    """Return why a store cannot be used; an empty string if it can."""
    store = RedisStore(url, timeout=3.0, connections=1, access=access)
    try:
        await store.put("t/a", "p", b"x", 60)
        await store.commit("t/a", ["p"], 60)
        assert await store.get("t/a", "p") == b"x"
        assert await store.delete("t/a", ["p"]) == 1
    except StoreUnavailableError as error:
        return str(error)
    finally:
        await store.close()
    return ""


@pytest.fixture
def files(tmp_path):
    return Certificates.make(tmp_path)


@pytest.fixture
def secured(tmp_path, files):
    """Return the URL of a Redis that speaks TLS, and only with those who show a certificate."""
    port = free_port()
    server = RedisProcess(
        tmp_path, "--tls-port", str(port), "--tls-cert-file", files.server, "--tls-key-file", files.server_key,
        "--tls-ca-cert-file", files.authority,
    )  # fmt: skip
    server.start()
    yield f"rediss://localhost:{port}"
    server.stop()


async def test_a_store_with_tls_is_verified_and_so_are_we(secured, files, tmp_path):
    good = Access(ca_file=Path(files.authority), certificate=Path(files.client), key=Path(files.client_key))
    good.check()
    assert await trouble(secured, good) == ""
    assert await trouble(secured, replace(good, ca_file=None, verify=False)) == ""
    # The system trusts no authority of ours, its certificate is of another name, and it wants one of us.
    assert "CERTIFICATE_VERIFY_FAILED" in await trouble(secured, replace(good, ca_file=None))
    assert "CERTIFICATE_VERIFY_FAILED" in await trouble(secured.replace("localhost", "127.0.0.1"), good)
    assert await trouble(secured, replace(good, certificate=None, key=None))
    assert await trouble(secured.replace("rediss", "redis"), good)
    other = tmp_path / "other"
    other.mkdir()
    assert "CERTIFICATE_VERIFY_FAILED" in await trouble(
        secured, replace(good, ca_file=Path(Certificates.make(other).authority))
    )


async def test_a_manager_and_the_doctor_reach_a_store_with_tls(secured, files, start_manager, connect, monkeypatch):
    options = {"store_ca_file": files.authority, "store_certificate": files.client, "store_key": files.client_key}
    manager = start_manager(store_url=secured, **options)
    async with connect(manager) as stub:
        await suspend(stub, (await resume(stub)).fence, PIECES)
        assert (await resume(stub)).data == b"".join(PIECES)
    (found,) = await asyncio.to_thread(check_store, secured)
    assert found.status is Status.FAILED
    assert "CERTIFICATE_VERIFY_FAILED" in found.found
    for name, value in options.items():
        monkeypatch.setenv(f"SCISSORHANDS_MANAGER_{name.upper()}", value)
    assert (await asyncio.to_thread(check_store, secured))[0].status is Status.OK


async def test_a_user_that_may_touch_nothing_but_our_keys(redis_server, start_manager, connect, tmp_path, monkeypatch):
    redis_server.command("ACL", "SETUSER", "hands", "on", ">hush", *documented_rules())
    redis_server.command("ACL", "SETUSER", "reader", "on", ">hush", "~scissorhands:*", "+@read", "+@connection")
    redis_server.command("ACL", "SETUSER", "default", "off")
    with_user = redis_server.url.replace("//", "//hands:hush@")
    assert await trouble(with_user) == ""
    assert await trouble(redis_server.url, Access(user="hands", password="hush")) == ""
    # What a URL says comes first.
    assert await trouble(with_user, Access(user="hands", password="wrong")) == ""
    assert "authenticated" in await trouble(redis_server.url)
    wrong = await trouble(redis_server.url.replace("//", "//hands:guess@"))
    assert "invalid username-password" in wrong
    assert "guess" not in wrong
    assert "no permissions" in await trouble(redis_server.url.replace("//", "//reader:hush@"))

    secret = tmp_path / "secret"
    secret.write_text("hush\n")
    manager = start_manager(
        store_url=redis_server.url, store_user="hands", store_password_file=secret, log_level="debug"
    )
    async with connect(manager) as stub:
        await suspend(stub, (await resume(stub)).fence, PIECES)
        assert (await resume(stub)).data == b"".join(PIECES)
        await asyncio.to_thread(wait_for, lambda: manager.metric("store_up") == 1, "the store")
    (found,) = await asyncio.to_thread(check_store, redis_server.url.replace("//", "//reader:hush@"))
    assert (found.status, "no permissions" in found.found) == (Status.FAILED, True)
    assert " ".join(documented_rules()) in found.fix
    monkeypatch.setenv("SCISSORHANDS_MANAGER_STORE_USER", "hands")
    monkeypatch.setenv("SCISSORHANDS_MANAGER_STORE_PASSWORD", "hush")
    answers, memory = await asyncio.to_thread(check_store, redis_server.url)
    assert (answers.status, memory.check) == (Status.OK, "store memory")


async def test_a_password_is_in_no_log(redis_server, start_manager, capfd):
    redis_server.command("CONFIG", "SET", "requirepass", "hush")
    managers = [
        start_manager(store_url=redis_server.url.replace("//", f"//:{password}@"), log_level="debug", grace=0)
        for password in ("hush", "hush-hush")
    ]
    await asyncio.to_thread(wait_for, lambda: managers[0].metric("store_up") == 1, "the store")
    await asyncio.to_thread(
        wait_for, lambda: managers[1].metric('store_errors_total{reason="unreachable"}') > 0, "the refusal"
    )
    for manager in managers:
        manager.terminate()
    told = capfd.readouterr().err
    assert "invalid username-password" in told
    assert "hush" not in told + "".join(line for manager in managers for line in manager.lines)
