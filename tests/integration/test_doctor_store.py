"""The doctor against real stores and a real server."""

import pytest
from support.processes import RedisProcess
from support.scripted_worker import scripted_worker

from scissorhands_server.doctor import store as store_checks
from scissorhands_server.doctor.finding import Status
from scissorhands_server.doctor.ports import check_grpc_port, check_server
from scissorhands_server.doctor.store import check_embedded_store, check_store


@pytest.fixture
def redis_with(tmp_path):
    started = []

    def start(*options):
        started.append(RedisProcess(tmp_path, *options))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.mark.parametrize(
    ("options", "status", "found"),
    [
        ((), Status.WARNING, "no limit"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), Status.WARNING, "allkeys-lru"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"), Status.OK, "67.1 MB"),
    ],
)
def test_how_a_store_treats_a_full_memory(redis_with, options, status, found):
    answers, memory = check_store(redis_with(*options).url)
    assert answers.status is Status.OK
    assert (memory.check, memory.status) == ("store memory", status)
    assert found in memory.found


def test_a_store_with_a_password(redis_with):
    store = redis_with()
    store.command("CONFIG", "SET", "requirepass", "hush")
    (found,) = check_store(store.url)
    assert found.status is Status.FAILED
    assert "password" in found.fix
    assert check_store(store.url.replace("//", "//:hush@"))[0].status is Status.OK
    (found,) = check_store(store.url.replace("//", "//:wrong@"))
    assert found.status is Status.FAILED
    assert "wrong@" not in found.found


def test_a_store_that_does_not_answer(redis_with, monkeypatch):
    monkeypatch.setattr(store_checks, "_TIMEOUT_SECONDS", 0.5)
    store = redis_with()
    store.pause()
    (found,) = check_store(store.url)
    assert found.status is Status.FAILED
    store.stop()
    (found,) = check_store(store.url)
    assert found.status is Status.FAILED
    (found,) = check_store("nonsense")
    assert found.status is Status.FAILED


def test_the_embedded_store_is_there():
    assert check_embedded_store().status is Status.OK


def test_a_port_of_a_server_of_ours_is_no_fault():
    with scripted_worker() as worker:
        port = int(worker.address.rpartition(":")[2])
        assert check_grpc_port("worker port", "127.0.0.1", port).status is Status.OK
        assert check_server("worker", worker.address).status is Status.OK
        worker.set_serving(False)
        assert check_server("worker", worker.address).status is Status.FAILED
