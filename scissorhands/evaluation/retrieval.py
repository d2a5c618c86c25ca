"""Retrieval: a fact hidden in a long text, and a question about it at the end.

``passkey`` hides a number (after Mohtashami and Jaggi, arXiv 2305.16300, section 4.2), ``needle`` a sentence (after
Kamradt's "needle in a haystack", 2023). The text around it is real, and so is the chat template.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scissorhands.errors import InvalidRequestError

_ROLES = ("cook", "gardener", "lighthouse keeper", "piano teacher", "sailor", "watchmaker")
# Words without a plural, so that a right answer is written in one way.
_FOODS = ("bread", "cheese", "honey", "marmalade", "mustard", "porridge", "rice", "spinach", "trout", "yogurt")


@dataclass(frozen=True)
class Fact:
    """What is hidden.

    Args:
        before: What the reader is told first.
        hidden: The sentence that is hidden.
        question: What is asked at the end.
        expected: The right answer.
    """

    before: str
    hidden: str
    question: str
    expected: str


@dataclass(frozen=True)
class Kind:
    """A way to hide something.

    Args:
        make: Draws a fact.
        found: Whether an answer is right, given what is expected.
        new_tokens: Most tokens of an answer.
    """

    make: Callable[[np.random.Generator], Fact]
    found: Callable[[str, str], bool]
    new_tokens: int


def _passkey(draw: np.random.Generator) -> Fact:
    key = str(draw.integers(10_000, 100_000))
    return Fact(
        before="A pass key is hidden in the following text. Remember it; you will be asked for it.",
        hidden=f"The pass key is {key}. Remember it: {key} is the pass key.",
        question="What is the pass key? Answer with the number only.",
        expected=key,
    )


def _is_number(answer: str, expected: str) -> bool:
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and numbers[0] == expected


def _needle(draw: np.random.Generator) -> Fact:
    role, answer = str(draw.choice(_ROLES)), str(draw.choice(_FOODS))
    return Fact(
        before="Read the following text. You will be asked about one sentence of it.",
        hidden=f"The {role}'s favorite food is {answer}.",
        question=f"According to the text, what is the {role}'s favorite food?",
        expected=answer,
    )


def _contains(answer: str, expected: str) -> bool:
    return expected in answer.casefold()


KINDS = {"passkey": Kind(_passkey, _is_number, 16), "needle": Kind(_needle, _contains, 32)}


def fact_of(kind: Kind, seed: int, trial: int) -> Fact:
    """Return the fact of a trial, the same for every length, place and budget."""
    return kind.make(np.random.default_rng([seed, trial]))


def hide(fact: Fact, tokenizer: Any, filler: Sequence[int], position: float, most: int) -> list[int]:
    """Return a prompt: real text with a fact hidden in it, and the question, in the model's chat template.

    Without a template it is plain text that ends where the answer should begin.

    Args:
        fact: What is hidden.
        tokenizer: A transformers tokenizer.
        filler: Tokens of the text; as many of the first are used as fit.
        position: Share of the text that comes before the fact, which goes to the end of the sentence before it.
        most: Most tokens of the prompt; it is a few shorter at most, if the filler suffices.

    Raises:
        InvalidRequestError: Not even the question fits.
    """
    taken = most - len(_prompt(fact, tokenizer, "", position))
    if taken < 0:
        raise InvalidRequestError("length", f"too short: the question alone takes {most - taken} tokens of {most}")
    while True:
        ids = _prompt(fact, tokenizer, tokenizer.decode(filler[:taken]), position)
        # Text that is cut at a token's end and joined again may be cut into other tokens.
        if len(ids) <= most or not taken:
            return ids
        taken = max(0, taken - (len(ids) - most))


def _prompt(fact: Fact, tokenizer: Any, text: str, position: float) -> list[int]:
    place = _sentence_end(text, position)
    parts = (fact.before, "", text[:place].rstrip(), fact.hidden, text[place:].lstrip(), "", fact.question)
    message = "\n".join(parts)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": message}]
        found = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        found = tokenizer(f"{message}\nAnswer:", verbose=False)["input_ids"]
    ids: list[int] = found
    return ids


def _sentence_end(text: str, position: float) -> int:
    """Return where a sentence ends at or before a share of a text; both ends are as they are."""
    place = round(position * len(text))
    if place in (0, len(text)):
        return place
    ends = [match.end() for match in re.finditer(r"[.!?]\s", text[: place + 1])]
    return ends[-1] if ends else 0
