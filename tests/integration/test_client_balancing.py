"""Several workers at one address: calls take turns over them, and leave out one that is gone."""

import pytest
from support.scripted_worker import scripted_worker

from scissorhands_client import AsyncClient, Client, channel

PATIENCE = 30.0


@pytest.fixture
def workers():
    with scripted_worker() as first, scripted_worker() as second:
        yield first, second


def address_of(*workers) -> str:
    return "ipv4:" + ",".join(worker.address for worker in workers)


def heard(workers) -> list[int]:
    return [len(worker.script.requests) for worker in workers]


def call_until_all_hear(client: Client, workers) -> None:
    """Which of them is connected first is open."""
    for _ in range(1000):
        client.generate("tell").result()
        if all(heard(workers)):
            return
    raise AssertionError(heard(workers))


def test_calls_take_turns(workers):
    with Client(address_of(*workers), timeout=PATIENCE) as client:
        call_until_all_hear(client, workers)
        before = heard(workers)
        for _ in range(10):
            assert client.generate("tell").result().text == "Héllo wörld"
    assert [count - old for count, old in zip(heard(workers), before, strict=True)] == [5, 5]


async def test_calls_of_the_async_client_take_turns(workers):
    async with AsyncClient(address_of(*workers), timeout=PATIENCE) as client:
        for _ in range(1000):
            await client.generate("tell").result()
            if all(heard(workers)):
                break
    assert all(heard(workers))


def test_a_worker_that_is_gone_is_left_out():
    with scripted_worker() as stays:
        with scripted_worker() as goes:
            client = Client(address_of(stays, goes), timeout=PATIENCE)
            call_until_all_hear(client, (stays, goes))
            before = len(stays.script.requests)
        with client:
            for _ in range(10):
                assert client.generate("tell").result().text == "Héllo wörld"
        assert len(stays.script.requests) == before + 10


@pytest.mark.parametrize(
    ("address", "direct"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("ipv4:127.0.0.1:50051,127.0.0.2:50052", True),
        ("ipv4:127.0.0.1:50051,10.0.0.1:50051", False),
        ("worker:50051", False),
    ],
)
def test_only_what_stays_on_this_machine_passes_by_a_proxy(address, direct):
    assert (("grpc.enable_http_proxy", 0) in channel.worker_options(address)) == direct
