"""The sync and the async client against a real gRPC server."""

import asyncio
import socket

import grpc
import pytest
from support.scripted_worker import scripted_worker

from scissorhands_client import (
    Accepted,
    AsyncClient,
    Budget,
    ChatMessage,
    Client,
    DeadlineExceededError,
    Delta,
    Finish,
    FinishReason,
    GenerateOptions,
    GrantSource,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    Policy,
    PrefillProgress,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
    TokenIds,
)

# Longer than anything here takes, in seconds.
PATIENCE = 30.0


@pytest.fixture(scope="module")
def serving():
    with scripted_worker() as worker:
        yield worker


@pytest.fixture
def worker(serving):
    serving.script.reset()
    return serving


@pytest.fixture
def client(worker):
    with Client(worker.address, timeout=PATIENCE) as client:
        yield client


def nobody_listens():
    """Return an address whose port was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_events_come_in_order_and_typed(client):
    events = list(client.generate("tell"))
    assert [type(event) for event in events] == [
        Accepted,
        PrefillProgress,
        PrefillProgress,
        Delta,
        Delta,
        Delta,
        Finish,
    ]
    accepted, finish = events[0], events[-1]
    assert (accepted.session_id, accepted.seed, accepted.queued_ahead) == ("session-1", 7, 2)
    assert accepted.grant.layer_slots == (64, 64)
    assert accepted.grant.source is GrantSource.MANAGER
    assert accepted.grant.raised
    assert accepted.grant.lease_seconds == 30
    assert events[2] == PrefillProgress(100, 100)
    assert (finish.reason, finish.stop) == (FinishReason.STOP, "[/end]")
    assert finish.usage.time_to_first_token_seconds == pytest.approx(1.5)
    assert finish.usage.tokens_per_second == pytest.approx(2.0)
    assert finish.cache.compression == pytest.approx(10.0)
    assert finish.cache.compression_16bit == pytest.approx(5.0)
    assert finish.cache.prefill_stall_seconds == pytest.approx(0.012)


def test_result_collects_text_and_tokens(client):
    result = client.generate("tell").result()
    assert result.text == "Héllo wörld"
    assert result.token_ids == (1, 2, 3, 4, 5)
    assert result.finish.cache.evicted_slots == 1234


async def test_async_result_equals_sync(worker, client):
    async with AsyncClient(worker.address, timeout=PATIENCE) as other:
        assert await other.generate("tell").result() == client.generate("tell").result()


def test_request_arrives_as_asked(worker, client):
    options = GenerateOptions(
        max_new_tokens=9,
        budget=Budget.fraction(0.25),
        policy=Policy("scissorhands", "paper", {"recent": 10}),
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        repetition_penalty=1.1,
        seed=0,
        stop="END",
        ignore_eos=True,
        model="scripted",
    )
    client.generate([ChatMessage("system", "be brief"), ChatMessage("user", "tell")], options).result()
    (request,) = worker.script.requests
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "be brief"), ("user", "tell")]
    assert (request.max_new_tokens, request.model, list(request.stop)) == (9, "scripted", ["END"])
    assert request.ignore_eos
    assert request.budget.fraction == 0.25
    assert (request.policy.name, request.policy.preset, dict(request.policy.parameters)) == (
        "scissorhands",
        "paper",
        {"recent": 10},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.5, 0.9, 3, 1.1)
    assert sampling.HasField("seed")
    assert sampling.seed == 0


def test_defaults_leave_the_choice_to_the_server(worker, client):
    client.generate(TokenIds((5, 6))).result()
    (request,) = worker.script.requests
    assert list(request.tokens.ids) == [5, 6]
    assert not request.HasField("budget")
    assert not request.HasField("policy")
    for name in ("top_p", "repetition_penalty", "seed"):
        assert not request.sampling.HasField(name)


def test_an_event_of_a_newer_server_is_skipped(client):
    assert client.generate("unknown").result().text == "known"


@pytest.mark.parametrize(
    ("prompt", "kind", "code"),
    [
        ("refuse", InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
        ("other-model", NotFoundError, grpc.StatusCode.NOT_FOUND),
        ("full", OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("crash", ServerError, grpc.StatusCode.INTERNAL),
        ("unfinished", ServerError, grpc.StatusCode.INTERNAL),
    ],
)
async def test_errors_are_alike_in_both_forms(worker, client, prompt, kind, code):
    with pytest.raises(kind) as sync_error:
        client.generate(prompt).result()
    async with AsyncClient(worker.address, timeout=PATIENCE) as other:
        with pytest.raises(kind) as async_error:
            await other.generate(prompt).result()
    assert sync_error.value.code is async_error.value.code is code
    assert sync_error.value.details == async_error.value.details != ""
    assert sync_error.value.info == async_error.value.info


def test_a_refused_field_is_named(client):
    with pytest.raises(InvalidRequestError) as raised:
        client.generate("refuse").result()
    assert raised.value.field == "sampling.top_p"
    assert raised.value.allowed == "must be above 0 and at most 1, got 2"
    assert raised.value.details == "sampling.top_p: must be above 0 and at most 1, got 2"
    assert raised.value.smallest_slots is None


def test_a_small_budget_tells_the_smallest(client):
    with pytest.raises(InvalidRequestError) as raised:
        client.generate("small-budget").result()
    assert raised.value.field == "budget.tokens"
    assert raised.value.smallest_slots == 52


def test_a_missing_thing_is_named(client):
    with pytest.raises(NotFoundError) as raised:
        client.generate("other-model").result()
    assert raised.value.field == "model"


def test_a_full_queue_tells_when_to_come_back(client):
    with pytest.raises(OverloadedError) as raised:
        client.generate("full").result()
    assert raised.value.retry_after == 2.5


def test_what_came_before_a_crash_is_delivered(client):
    stream = client.generate("crash")
    assert isinstance(next(stream), Accepted)
    assert next(stream) == Delta("half an ans", (1,))
    with pytest.raises(ServerError) as raised:
        next(stream)
    assert "nobody foresaw" not in str(raised.value)


def test_leaving_the_block_cancels_at_the_server(worker, client):
    with client.generate("hang") as stream:
        assert isinstance(next(stream), Accepted)
    assert worker.script.cancelled.wait(PATIENCE)
    with pytest.raises(RequestCancelledError):
        list(stream)


def test_cancel_after_the_end_does_nothing(worker, client):
    stream = client.generate("tell")
    list(stream)
    stream.cancel()
    assert list(stream) == []
    assert not worker.script.cancelled.is_set()


async def test_async_cancel_reaches_the_server(worker):
    async with AsyncClient(worker.address, timeout=PATIENCE) as client:
        stream = client.generate("hang")
        async with stream:
            assert isinstance(await anext(stream), Accepted)
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                pass
    assert await asyncio.to_thread(worker.script.cancelled.wait, PATIENCE)


async def test_a_cancel_from_another_task_is_told_to_the_reader(worker):
    async with AsyncClient(worker.address, timeout=PATIENCE) as client:
        stream = client.generate("silence")
        reading = asyncio.create_task(stream.result())
        assert await asyncio.to_thread(worker.script.started.wait, PATIENCE)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await reading
        assert not reading.cancelled()


async def test_cancelling_the_task_cancels_the_request(worker):
    async with AsyncClient(worker.address, timeout=PATIENCE) as client:
        reading = asyncio.create_task(client.generate("silence").result())
        assert await asyncio.to_thread(worker.script.started.wait, PATIENCE)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert reading.cancelled()
        assert await asyncio.to_thread(worker.script.cancelled.wait, PATIENCE)


@pytest.mark.parametrize("prompt", ["silence", "hang"])
async def test_deadlines_end_both_forms(worker, client, prompt):
    with pytest.raises(DeadlineExceededError):
        client.generate(prompt, timeout=0.3).result()
    assert worker.script.cancelled.wait(PATIENCE)
    async with AsyncClient(worker.address, timeout=0.3) as other:
        with pytest.raises(DeadlineExceededError):
            await other.generate(prompt).result()


async def test_nobody_at_the_address(worker):
    address = nobody_listens()
    with Client(address, timeout=PATIENCE) as client, pytest.raises(ServerUnavailableError) as raised:
        client.generate("tell").result()
    assert raised.value.info.reason == ""
    async with AsyncClient(address, timeout=PATIENCE) as other:
        with pytest.raises(ServerUnavailableError):
            await other.get_model()


async def test_get_model(worker, client):
    served = client.get_model()
    assert (served.model.name, served.model.layers, served.policies) == ("scripted", 2, ("h2o", "full"))
    async with AsyncClient(worker.address) as other:
        assert await other.get_model() == served


async def test_wait_ready_returns_once_the_server_serves(worker, client):
    worker.set_serving(False)
    try:
        with pytest.raises(DeadlineExceededError, match="NOT_SERVING"):
            client.wait_ready(0.5)
        async with AsyncClient(worker.address) as other:
            waiting = asyncio.create_task(other.wait_ready(PATIENCE))
            await asyncio.sleep(0)
            assert not waiting.done()
            await asyncio.to_thread(worker.set_serving, True)
            await waiting
    finally:
        worker.set_serving(True)
    client.wait_ready(PATIENCE)


async def test_wait_ready_says_why_it_gave_up():
    address = nobody_listens()
    with Client(address) as client, pytest.raises(DeadlineExceededError, match="refused"):
        client.wait_ready(1.0)
    async with AsyncClient(address) as other:
        with pytest.raises(DeadlineExceededError, match="refused"):
            await other.wait_ready(1.0)


def test_a_server_that_comes_back_is_found_again():
    with scripted_worker() as first:
        client = Client(first.address, timeout=PATIENCE)
        assert client.generate("tell").result().text == "Héllo wörld"
        port = int(first.address.rpartition(":")[2])
    with client:
        with pytest.raises(ServerUnavailableError):
            client.generate("tell").result()
        with scripted_worker(port):
            client.wait_ready(PATIENCE)
            assert client.generate("tell").result().text == "Héllo wörld"


def test_streams_share_a_client(client):
    streams = [client.generate("tell") for _ in range(8)]
    assert {stream.result().text for stream in streams} == {"Héllo wörld"}
