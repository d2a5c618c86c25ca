from datetime import UTC, datetime

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from scissorhands.v1 import budget_pb2, cache_manager_pb2, generation_pb2, model_pb2, quality_pb2
from scissorhands_client import (
    Budget,
    ChatMessage,
    Divergence,
    FinishReason,
    GenerateOptions,
    GrantSource,
    InvalidRequestError,
    Policy,
    Priority,
    Quality,
    SegmentInfo,
    SessionState,
    ShadowResult,
    TokenIds,
)
from scissorhands_client.convert import generate_request, list_request, read_event, read_served_model, read_session


def test_the_prompt_decides_its_kind():
    assert generate_request("text", GenerateOptions()).text == "text"
    assert generate_request("", GenerateOptions()).WhichOneof("prompt") == "text"
    assert list(generate_request(TokenIds((1, 2)), GenerateOptions()).tokens.ids) == [1, 2]
    assert generate_request(TokenIds(()), GenerateOptions()).WhichOneof("prompt") == "tokens"
    chat = generate_request([ChatMessage("user", "hello")], GenerateOptions()).chat
    assert [(each.role, each.content) for each in chat.messages] == [("user", "hello")]
    assert generate_request([], GenerateOptions()).WhichOneof("prompt") == "chat"


@pytest.mark.parametrize(
    ("budget", "field", "value"),
    [
        (Budget.tokens(256), "tokens", 256),
        (Budget.bytes(2**40), "bytes", 2**40),
        (Budget.fraction(0.2), "fraction", 0.2),
    ],
)
def test_budgets(budget, field, value):
    message = generate_request("x", GenerateOptions(budget=budget)).budget
    assert message.WhichOneof("amount") == field
    assert getattr(message, field) == value


@pytest.mark.parametrize("policy", ["scissorhands:paper", Policy("scissorhands", "paper")])
def test_policies(policy):
    message = generate_request("x", GenerateOptions(policy=policy)).policy
    assert (message.name, message.preset) == ("scissorhands", "paper")


def test_one_stop_string_is_a_list_of_one():
    assert list(generate_request("x", GenerateOptions(stop="END")).stop) == ["END"]
    assert list(generate_request("x", GenerateOptions(stop=("a", "b"))).stop) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerateOptions(max_new_tokens=-1), "max_new_tokens"),
        (GenerateOptions(max_new_tokens=2**32), "max_new_tokens"),
        (GenerateOptions(top_k=-1), "sampling.top_k"),
        (GenerateOptions(seed=2**64), "sampling.seed"),
        (GenerateOptions(policy=Policy("h2o", parameters={"recent": -3})), "policy.parameters.recent"),
        (GenerateOptions(stop="\ud800"), "stop"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused(options, field):
    with pytest.raises(InvalidRequestError) as raised:
        generate_request("x", options)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("priority", "number"),
    [
        (Priority.LOW, generation_pb2.PRIORITY_LOW),
        (Priority.NORMAL, generation_pb2.PRIORITY_NORMAL),
        (Priority.HIGH, generation_pb2.PRIORITY_HIGH),
    ],
)
def test_priorities(priority, number):
    assert generate_request("x", GenerateOptions(priority=priority)).priority == number
    assert number == generation_pb2.Priority.Value(f"PRIORITY_{priority.name}")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("\udcff", "text"),
        ([ChatMessage("user", "\udcff")], "chat.messages.content"),
        (TokenIds((1, -1)), "tokens.ids"),
    ],
)
def test_prompts_that_the_protocol_cannot_carry(prompt, field):
    with pytest.raises(InvalidRequestError) as raised:
        generate_request(prompt, GenerateOptions())
    assert raised.value.field == field


def test_what_a_newer_server_sends_is_read_as_far_as_it_is_known():
    assert read_event(generation_pb2.GenerateResponse()) is None
    finish = read_event(generation_pb2.GenerateResponse(finish=generation_pb2.Finish(reason=99)))
    assert finish.reason is FinishReason.UNSPECIFIED
    assert finish.usage.tokens_per_second is None
    assert finish.cache.compression is None
    accepted = read_event(generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted()))
    assert accepted.grant.source is GrantSource.UNSPECIFIED
    assert accepted.seed is None


def test_a_greedy_seed_differs_from_seed_zero():
    accepted = read_event(generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(seed=0)))
    assert accepted.seed == 0


def test_a_served_model():
    message = generation_pb2.GetModelResponse(
        model=model_pb2.ModelInfo(name="m", kv_heads=3, element_bytes=2),
        max_rows=4,
        max_queued=8,
        default_max_new_tokens=16,
        policies=["h2o", "full"],
        chat=True,
        version="1",
        manager_connected=True,
        cache_bytes=1 << 33,
        more_rows=5,
    )
    served = read_served_model(message)
    assert (served.cache_bytes, served.more_rows) == (1 << 33, 5)
    assert (served.model.name, served.model.kv_heads, served.model.element_bytes) == ("m", 3, 2)
    assert (served.max_rows, served.max_queued, served.default_max_new_tokens) == (4, 8, 16)
    assert (served.policies, served.chat, served.version, served.manager_connected) == (
        ("h2o", "full"),
        True,
        "1",
        True,
    )


def test_a_session():
    message = cache_manager_pb2.Session(
        spec=cache_manager_pb2.SessionSpec(
            session_id="s",
            budget=budget_pb2.Budget(fraction=0.2),
            policy=budget_pb2.Policy(name="h2o", parameters={"recent": 4}),
            grant=budget_pb2.Grant(lease=Duration(seconds=30, nanos=500_000_000), source="GRANT_SOURCE_LOCAL"),
        ),
        state=cache_manager_pb2.SESSION_STATE_EXPIRED,
        open_time=Timestamp(seconds=1_700_000_000),
        persistence=[0.5, 0.75],
        segments=[cache_manager_pb2.SegmentInfo(epoch=1, step=64, slots=12, size_bytes=100)],
        quality=quality_pb2.Quality(recent_mass_dropped=0.0, recent_mass_dropped_peak=0.25, shadow=3),
    )
    session = read_session(message)
    assert (session.session_id, session.state) == ("s", SessionState.EXPIRED)
    assert session.budget == Budget.fraction(0.2)
    assert session.policy == Policy("h2o", "", {"recent": 4})
    assert (session.grant.lease_seconds, session.grant.source) == (30.5, GrantSource.LOCAL)
    assert session.open_time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert session.persistence == (0.5, 0.75)
    assert session.segments == (SegmentInfo(1, 64, 12, 100),)
    assert session.quality == Quality(0.0, 0.25, None, ShadowResult.LATE, None)


def test_an_empty_session_has_no_wishes_and_no_grant():
    session = read_session(cache_manager_pb2.Session())
    assert (session.budget, session.policy, session.grant, session.quality) == (None, None, None, None)


def test_what_eviction_cost():
    quality = quality_pb2.Quality(
        shadow=quality_pb2.SHADOW_RESULT_MEASURED,
        divergence=quality_pb2.Divergence(tokens=4, nats=0.5, same_share=0.75),
    )
    finish = read_event(generation_pb2.GenerateResponse(finish=generation_pb2.Finish(quality=quality)))
    assert finish.quality == Quality(None, None, None, ShadowResult.MEASURED, Divergence(4, 0.5, 0.75))


def test_a_full_cache_is_compared_with_only_if_somebody_says_so():
    assert not generate_request("text", GenerateOptions()).HasField("shadow")
    for said in (True, False):
        request = generate_request("text", GenerateOptions(shadow=said))
        assert request.HasField("shadow")
        assert request.shadow is said


def test_pages_of_sessions_are_asked_for():
    request = list_request(SessionState.CLOSED, 10, "next")
    assert (request.state, request.page_size, request.page_token) == (2, 10, "next")
    assert list_request(None, 10, "").state == 0
    with pytest.raises(InvalidRequestError, match="page_size"):
        list_request(None, -1, "")


def test_a_compression_and_a_resident_format_are_asked_for():
    options = GenerateOptions(budget=Budget.compression(20), resident_codec="turboquant:k4v3")
    request = generate_request("x", options)
    assert (request.budget.compression, request.resident_codec) == (20, "turboquant:k4v3")


def test_resident_formats_are_told_of_every_entry():
    grant = budget_pb2.Grant(resident_codecs=["none", "int4"], resident_codec_indices=[1, 0, 1, 7])
    message = generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(grant=grant))
    assert read_event(message).grant.resident_codecs == ("int4", "none", "int4")


def test_the_session_that_is_kept():
    assert generate_request("x", GenerateOptions(session_id="talk-1")).session_id == "talk-1"
    assert generate_request("x", GenerateOptions()).session_id == ""
    accepted = generation_pb2.Accepted(resumed_tokens=7)
    assert read_event(generation_pb2.GenerateResponse(accepted=accepted)).resumed_tokens == 7
    finish = generation_pb2.Finish(cache=generation_pb2.CacheStatistics(suspended_bytes=9))
    assert read_event(generation_pb2.GenerateResponse(finish=finish)).cache.suspended_bytes == 9
