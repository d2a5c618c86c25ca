import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.real_model import REAL_MODEL, require
from support.tiny_tokenizers import byte_fallback, byte_level, slow
from transformers import AutoTokenizer

from scissorhands.errors import InvalidRequestError
from scissorhands_server.worker.text import TextStream, check_stops


@pytest.fixture(scope="module")
def real_tokenizer():
    return AutoTokenizer.from_pretrained(require(REAL_MODEL))


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer, ids, stops=()):
    """Return all text, the stop string and how many tokens were pushed."""
    stream = TextStream(tokenizer, stops)
    text = ""
    for count, token in enumerate(ids, 1):
        delta = stream.push(token)
        text += delta.text
        if delta.stop is not None:
            return text, delta.stop, count
    return text + stream.finish(), None, len(ids)


def expected(text, stops):
    """Read the text from its beginning, one character more at a time, until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.real_model
@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_the_deltas_of_any_text_are_its_decoding(real_tokenizer, text):
    ids = real_tokenizer(text, add_special_tokens=False).input_ids
    assert streamed(real_tokenizer, ids)[0] == decode(real_tokenizer, ids)


@pytest.mark.real_model
@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=30))
def test_the_deltas_of_any_tokens_are_their_decoding_even_if_they_are_no_utf8(real_tokenizer, ids):
    assert streamed(real_tokenizer, ids)[0] == decode(real_tokenizer, ids)


@pytest.mark.real_model
@settings(max_examples=500, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_strings_are_found_as_in_the_full_text(real_tokenizer, data):
    text = data.draw(st.text(alphabet="ab \n日🙂é", min_size=1, max_size=40))
    piece = st.text(alphabet="ab \n日🙂é", min_size=1, max_size=5)
    cut = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 8)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(st.one_of(piece, cut), max_size=4))
    ids = real_tokenizer(text, add_special_tokens=False).input_ids
    assert streamed(real_tokenizer, ids, stops)[:2] == expected(text, stops)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(max_size=30), stops=st.lists(st.text(min_size=1, max_size=3), max_size=3))
@pytest.mark.parametrize("make", [byte_level, slow])
def test_one_byte_at_a_time_gives_the_same_text_and_stop(make, text, stops):
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    full = decode(tokenizer, ids)
    # A replacement character of the text's own looks like half a character until the end; there the text is still cut.
    text_and_stop = expected(full, stops)
    got = streamed(tokenizer, ids, stops)
    assert got[0] == text_and_stop[0]
    assert got[1] == text_and_stop[1] or "\ufffd" in full


def test_a_character_of_several_tokens_appears_with_its_last_one():
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    ids = tokenizer("é日🙂").input_ids
    assert len(ids) == 2 + 3 + 4
    assert [stream.push(token).text for token in ids] == ["", "é", "", "", "日", "", "", "", "🙂"]
    assert stream.finish() == ""


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
def test_half_a_character_at_the_end_is_told_as_one_replacement(make):
    tokenizer = make()
    ids = tokenizer("aé日", add_special_tokens=False).input_ids[:-1]
    text, _, _ = streamed(tokenizer, ids)
    assert text == decode(tokenizer, ids)
    assert text.startswith("aé")


def test_byte_fallback_joins_bytes_and_keeps_spaces():
    tokenizer = byte_fallback()
    names = ["▁Hello", "▁world", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁a", "<0x0A>", "▁world", "é", "."]
    ids = tokenizer.convert_tokens_to_ids(names)
    stream = TextStream(tokenizer)
    deltas = [stream.push(token).text for token in ids]
    assert deltas == ["Hello", " world", "", "", "", "🙂", " a", "\n", " world", "é", "."]
    assert "".join(deltas) == decode(tokenizer, ids)


def test_bytes_that_are_no_character_do_not_end_the_stream():
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["a", "<0x37>", "<0x9C>", "<0x15>", "▁world", "<0xE2>", "a", "▁a"])
    text, _, _ = streamed(tokenizer, ids)
    assert text.startswith("a7")
    assert text.endswith("a a")
    assert " world" in text


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
def test_special_tokens_have_no_text_and_cost_no_space(make):
    tokenizer = make()
    end = tokenizer.eos_token_id
    ids = [end, *tokenizer("a a", add_special_tokens=False).input_ids]
    ids = [token for pair in zip(ids, [end] * len(ids), strict=True) for token in pair]
    assert streamed(tokenizer, ids)[0] == decode(tokenizer, ids) == "a a"


def test_a_stop_string_across_tokens_is_held_back_until_it_is_certain():
    tokenizer = byte_level()
    stream = TextStream(tokenizer, ["</end>"])
    texts, stops = zip(*[(d.text, d.stop) for d in map(stream.push, tokenizer("x</em</end>").input_ids)], strict=True)
    assert texts == ("x", "", "", "", "</em", "", "", "", "", "", "")
    assert stops == (*[None] * 10, "</end>")


def test_a_stop_string_within_one_token_cuts_the_token():
    tokenizer = byte_level(words=("oneSTOPtwo",))
    stream = TextStream(tokenizer, ["STOP"])
    delta = stream.push(tokenizer.convert_tokens_to_ids("oneSTOPtwo"))
    assert (delta.text, delta.stop) == ("one", "STOP")


@pytest.mark.parametrize(
    ("stops", "result"),
    [
        (["b", "abc"], ("xa", "b")),
        (["bc", "abc"], ("x", "abc")),
        (["c", "xabcd"], ("xab", "c")),
        (["d", "a"], ("x", "a")),
        (["y"], ("xabcd", None)),
        (["de"], ("xabcd", None)),
    ],
)
@pytest.mark.parametrize("words", [(), ("xabcd",), ("xab", "cd")])
def test_the_first_stop_string_to_be_complete_ends_the_answer(stops, result, words):
    tokenizer = byte_level(words)
    names = words or tuple("xabcd")
    assert streamed(tokenizer, tokenizer.convert_tokens_to_ids(list(names)), stops)[:2] == result


@pytest.mark.parametrize(
    ("stops", "field"),
    [(["a"] * 17, "stop"), (["a", ""], "stop[1]"), (["x" * 257], "stop[0]")],
)
def test_bad_stop_strings_are_refused(stops, field):
    with pytest.raises(InvalidRequestError) as caught:
        check_stops(stops)
    assert caught.value.field == field


def test_the_most_and_longest_stop_strings_are_accepted():
    assert check_stops(["x" * 256] * 16) == ("x" * 256,) * 16
