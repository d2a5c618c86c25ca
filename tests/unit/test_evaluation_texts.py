"""Texts: how sequences are cut, and what is refused."""

import hashlib

import numpy as np
import pytest
from support.tiny_tokenizers import byte_fallback, byte_level
from tokenizers.processors import TemplateProcessing

from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.texts import Text, cut, read_text, sequences_of, shares


def text(content, name="a.txt"):
    return Text(name, "", content)


def test_cuts_do_not_overlap_and_spread_over_the_text():
    found = cut(np.arange(103), 5, 10, "a")
    assert found[:, 0].tolist() == [0, 20, 41, 61, 82]
    assert all(np.array_equal(row, np.arange(row[0], row[0] + 10)) for row in found)


def test_a_text_that_just_suffices_and_one_that_does_not():
    assert np.array_equal(cut(np.arange(50), 5, 10, "a"), np.arange(50).reshape(5, 10))
    with pytest.raises(InvalidRequestError, match=r"text: a has 49 tokens, but 5 sequences of 10 need 50") as refused:
        cut(np.arange(49), 5, 10, "a")
    assert refused.value.field == "text"


def test_texts_share_the_sequences():
    assert shares(8, 3) == [3, 3, 2]
    tokenizer = byte_level()
    found = sequences_of([text("a" * 40), text("b" * 40), text("c" * 40)], tokenizer, 5, 8)
    assert [tokenizer.decode(row) for row in found] == ["a" * 8, "a" * 8, "b" * 8, "b" * 8, "c" * 8]


def test_more_texts_than_sequences_are_refused():
    with pytest.raises(InvalidRequestError, match="sequences: must be at least the number of texts"):
        sequences_of([text("a" * 40), text("b" * 40)], byte_level(), 1, 8)


def test_each_sequence_starts_as_the_tokenizer_starts_a_text():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    found = sequences_of([text("abcdefgh" * 5)], tokenizer, 2, 9)
    assert found.shape == (2, 9)
    assert found[:, 0].tolist() == [1, 1]
    assert 1 not in found[:, 1:]
    assert 1 not in sequences_of([text("abc" * 20)], byte_fallback(), 1, 9)


def test_reading(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("é\n".encode())
    found = read_text(path)
    assert (found.name, found.content) == ("a.txt", "é\n")
    assert found.sha256 == hashlib.sha256("é\n".encode()).hexdigest()
    path.write_bytes(b"ab\xff")
    with pytest.raises(InvalidRequestError, match=r"is not UTF-8 text \(byte 2\)"):
        read_text(path)
