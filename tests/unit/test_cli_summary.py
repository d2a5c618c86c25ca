import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from scissorhands.v1 import budget_pb2, generation_pb2
from scissorhands_client.budget import Budget
from scissorhands_client.collector import Collector
from scissorhands_client.commands.summary import result_object, summary_line, summary_table, to_json
from scissorhands_client.convert import read_event
from scissorhands_client.errors import ServerError
from scissorhands_client.quality import Divergence, Quality, ShadowResult
from scissorhands_client.types import Delta, GrantSource


@pytest.fixture
def result():
    grant = budget_pb2.Grant(policy="h2o", layer_slots=[20, 10, 20], source=budget_pb2.GRANT_SOURCE_LOCAL)
    collector = Collector()
    for message in (
        generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(session_id="s", grant=grant)),
        generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="[bold]x", token_ids=[1])),
        generation_pb2.GenerateResponse(finish=generation_pb2.Finish(usage=generation_pb2.Usage(generated_tokens=1))),
    ):
        collector.add(read_event(message))
    return collector.result()


def shown(result):
    file = StringIO()
    Console(width=200, markup=False, file=file).print(summary_table(result))
    return file.getvalue()


def test_what_cannot_be_computed_is_not_shown_as_a_number(result):
    text = shown(result)
    assert "unknown" in text
    assert "too few tokens for a speed" in text
    assert "Seed" not in text
    answer = json.loads(to_json(result_object(result)))
    assert answer["cache"]["compression"] is answer["cache"]["compression_16bit"] is None
    assert answer["usage"]["tokens_per_second"] is answer["seed"] is None


def test_what_was_kept_is_told(result):
    assert "Resumed" not in shown(result)
    assert "Kept" not in shown(result)
    accepted, finish = replace(result.accepted, resumed_tokens=1234), result.finish
    finish = replace(finish, cache=replace(finish.cache, suspended_bytes=5_000_000))
    told = replace(result, accepted=accepted, finish=finish)
    assert "1,234 tokens of the prompt, not read again" in shown(told)
    assert "5.0 MB in the store" in shown(told)
    assert "1,234 resumed" in summary_line(told)
    answer = json.loads(to_json(result_object(told)))
    assert (answer["resumed_tokens"], answer["cache"]["suspended_bytes"]) == (1234, 5_000_000)


@pytest.mark.parametrize(
    ("codecs", "words"),
    [
        ((), None),
        (("none", "int4", "int4"), "resident in int4"),
        (("klt:k4v3", "klt:k4v4", "klt:k5v3"), "resident in 3 formats, such as klt:k4v3"),
    ],
)
def test_the_formats_of_resident_slots_are_named(result, codecs, words):
    accepted = result.accepted
    text = shown(replace(result, accepted=replace(accepted, grant=replace(accepted.grant, resident_codecs=codecs))))
    assert words in text if words else "resident in" not in text


def test_what_eviction_cost_is_told_as_far_as_it_is_known(result):
    assert not any(name in shown(result) for name in ("Recent attention", "Importance", "Against a full cache"))
    assert "nats" not in summary_line(result)
    known = Quality(0.0123, 0.2, 0.81, ShadowResult.MEASURED, Divergence(2000, 0.0525, 0.9375))
    told = replace(result, finish=replace(result.finish, quality=known))
    text = shown(told)
    assert "1.23% an eviction on average, 20.00% at most" in text
    assert "81% (50% is chance)" in text
    assert "0.0525 nats a token, the same choice at 93.8% of 2,000 tokens" in text
    assert "0.0525 nats from the full cache" in summary_line(told)
    assert json.loads(to_json(result_object(told)))["quality"]["divergence"]["same_share"] == 0.9375


@pytest.mark.parametrize("outcome", [ShadowResult.NO_MEMORY, ShadowResult.LATE, ShadowResult.FAILED])
def test_why_there_is_no_comparison_is_told(result, outcome):
    without = replace(result.finish.quality, shadow=outcome)
    assert "not compared: " in shown(replace(result, finish=replace(result.finish, quality=without)))


def test_who_granted_and_how_much_is_told(result):
    text = shown(result)
    assert "10 to 20 slots per layer and KV head, h2o, granted by the worker: no manager answered" in text


def test_text_that_looks_like_markup_is_only_text(result):
    marked = replace(result, finish=replace(result.finish, stop="[/bold]"))
    assert "stopped at '[/bold]'" in shown(marked)


def test_the_line_names_both_lengths(result):
    assert summary_line(result).startswith("0 + 1 tokens, ")


def test_json_has_values_of_enumerations_and_refuses_the_rest():
    assert json.loads(to_json({"source": GrantSource.LOCAL})) == {"source": "local"}
    with pytest.raises(TypeError, match="Budget"):
        to_json(Budget.tokens(1))


def test_an_answer_without_its_ends_is_an_error():
    collector = Collector()
    collector.add(Delta("text", ()))
    with pytest.raises(ServerError):
        collector.result()
