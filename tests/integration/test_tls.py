"""TLS on both servers, over real connections: who gets in, what those are told who do not, and renewals under load."""

import asyncio
import math
import signal
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry
from support.certificates import Authority
from support.tiny_worker import metrics, settings, tiny_loaded
from support.waiting import SECONDS, until

from scissorhands.credentials import Credentials
from scissorhands_client import AsyncClient, AsyncManagerClient, GenerateOptions, ServerUnavailableError
from scissorhands_client.commands.sessions import sessions
from scissorhands_server.healthcheck import main as healthcheck
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.manager_channel import ManagerChannel
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.server import Worker

OPTIONS = GenerateOptions(max_new_tokens=12, ignore_eos=True)
PROMPT = "Once upon a time there was a pair of scissors"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


@pytest.fixture
def stranger(tmp_path):
    return Authority(tmp_path / "stranger")


def serving(authority, *, mutual=False, name="server", **issued):
    certificate, key = authority.issue(name, **issued)
    return {"tls_certificate": certificate, "tls_key": key, **({"tls_client_ca": authority.file} if mutual else {})}


async def answered(port, credentials):
    async with AsyncClient(f"localhost:{port}", credentials=credentials) as client:
        return (await client.generate(PROMPT, OPTIONS).result()).token_ids


async def test_worker_and_manager_over_mutual_tls_answer_as_they_do_without(redis_server, start_manager, authority):
    shown = serving(authority, mutual=True)
    manager = start_manager(store_url=redis_server.url, **shown)
    client = Credentials(authority.file, *authority.issue("client"))
    reached = {"manager_ca_file": authority.file, "manager_certificate": client.certificate, "manager_key": client.key}
    address = f"localhost:{manager.port}"
    async with Worker(settings(manager=address, **shown, **reached), tiny_loaded()) as worker:
        await until(lambda: worker._link.up, "the manager")
        tokens = await answered(worker.port, client)
        async with AsyncManagerClient(address, credentials=client) as asked:
            (session,) = [each async for each in asked.list_sessions()]
        assert session.step > 0
        assert 0 < metrics(worker)["scissorhands_worker_certificate_left_seconds"] < math.inf
    assert 0 < manager.metric("certificate_left_seconds") < math.inf
    async with Worker(settings(), tiny_loaded()) as plain:
        assert await answered(plain.port, None) == tokens
        assert metrics(plain)["scissorhands_worker_certificate_left_seconds"] == math.inf


async def test_who_does_not_get_in_is_told_which_option_to_give(redis_server, start_manager, authority, stranger):
    manager = start_manager(store_url=redis_server.url, **serving(authority, mutual=True))
    address = f"localhost:{manager.port}"
    certificate, key = authority.issue("client")
    shown = ["--certificate", str(certificate), "--key", str(key)]
    good = ["--ca-file", str(authority.file), *shown]
    stranger_shown = [str(path) for path in stranger.issue("client")]
    cases = [
        (address, [], "give --ca-file"),
        (address, ["--ca-file", str(authority.file)], "give a --certificate that it trusts"),
        (
            address,
            ["--ca-file", str(authority.file), "--certificate", stranger_shown[0], "--key", stranger_shown[1]],
            "give a --certificate that it trusts",
        ),
        (address, ["--ca-file", str(stranger.file), *shown], "--ca-file names no authority"),
        (address.replace("localhost", "127.0.0.1"), good, "or give --server-name"),
        (address, shown, "needs ca_file"),
        (address, ["--ca-file", "none.pem"], "none.pem cannot be used"),
    ]
    for server, options, message in cases:
        told = CliRunner().invoke(sessions, ["list", "--manager", server, *options])
        assert told.exit_code != 0
        assert message in told.output, told.output
        checked = CliRunner().invoke(healthcheck, [server, *options])
        assert checked.exit_code == 1
        assert message in checked.output
    assert CliRunner().invoke(sessions, ["list", "--manager", address, *good]).output == "no sessions\n"
    named = [address.replace("localhost", "127.0.0.1"), *good, "--server-name", "localhost"]
    assert CliRunner().invoke(healthcheck, named).output == "SERVING\n"
    variables = {
        "SCISSORHANDS_CLIENT_CA_FILE": str(authority.file),
        "SCISSORHANDS_CLIENT_CERTIFICATE": str(certificate),
        "SCISSORHANDS_CLIENT_KEY": str(key),
    }
    assert CliRunner().invoke(healthcheck, [address], env=variables).output == "SERVING\n"


def test_tls_towards_a_server_without_it_is_told(redis_server, start_manager, authority):
    manager = start_manager(store_url=redis_server.url)
    options = ["--manager", manager.address, "--ca-file", str(authority.file)]
    assert "leave --ca-file out" in CliRunner().invoke(sessions, ["list", *options]).output


@asynccontextmanager
async def asking(port, credentials, failures, answers):
    """Ask for one answer after the other in the background, each over a connection of its own."""

    async def ask():
        while True:
            try:
                answers.append(await answered(port, credentials))
            except ServerUnavailableError as error:
                failures.append(error)
                return

    tasks = [asyncio.create_task(ask()) for _ in range(3)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_certificate_expires_and_is_replaced_under_load(authority):
    def soon():
        # Certificates end at whole seconds.
        return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)

    ends = soon()
    shown = serving(authority, not_after=ends)
    credentials = Credentials(authority.file)
    series = 'scissorhands_worker_certificate_reloads_total{result="done"}'
    async with Worker(settings(**shown), tiny_loaded()) as worker:
        failures, answers = [], []
        async with asking(worker.port, credentials, failures, answers):
            await until(lambda: len(answers) > 3 or failures, "answers")
            authority.issue("server", not_after=datetime.now(UTC) + timedelta(days=1))
            await asyncio.sleep(max(0, (ends - datetime.now(UTC)).total_seconds()) + 1)
            many = len(answers)
            await until(lambda: len(answers) > many + 6 or failures, "answers")
        assert not failures
        assert len(set(answers)) == 1
        assert metrics(worker)[series] == 1
        # Without a new one, the end of a certificate is the end of new connections.
        authority.issue("server", not_after=(ends := soon()))
        assert await answered(worker.port, credentials) == answers[0]
        await asyncio.sleep((ends - datetime.now(UTC)).total_seconds() + 1)
        with pytest.raises(ServerUnavailableError, match="or that is out of date"):
            await answered(worker.port, credentials)


async def test_a_worker_shows_its_new_certificate_without_a_restart(redis_server, start_manager, authority, stranger):
    manager = start_manager(store_url=redis_server.url, **serving(authority, mutual=True))
    certificate, key = stranger.issue("worker")
    link = ManagerLink(
        f"localhost:{manager.port}",
        WorkerMetrics(CollectorRegistry(), "tiny", 1, 1),
        SECONDS,
        Credentials(authority.file, certificate, key),
    )
    await link.start()
    try:
        assert not link.up
        authority.issue("worker", folder=certificate.parent)
        async with asyncio.timeout(SECONDS):
            await link.wait_up()
        # Half of a renewal is not taken, and the connection stays.
        key.write_bytes(stranger.issue("other")[1].read_bytes())
        link._channel.renew()
        await link._check()
        assert link.up
    finally:
        await link.stop()


async def test_calls_in_progress_go_on_while_the_worker_connects_anew(redis_server, start_manager, authority):
    manager = start_manager(store_url=redis_server.url, **serving(authority, mutual=True))
    credentials = Credentials(authority.file, *authority.issue("worker"))
    channel = ManagerChannel(f"localhost:{manager.port}", credentials)
    try:
        watching = channel.health.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        before = channel.health
        channel.renew()
        assert channel.health is before
        authority.issue("worker")
        channel.renew()
        assert channel.health is not before
        await channel.health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert not watching.done()
        manager.send(signal.SIGTERM)
        # Its last word comes over the connection that was replaced.
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await channel.close()
