"""Texts: reading files and cutting sequences of equal length out of them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scissorhands.errors import InvalidRequestError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """A text and where it is from.

    Args:
        name: Name of its file.
        sha256: Digest of its bytes.
        content: The text.
    """

    name: str
    sha256: str
    content: str


def read_text(path: Path) -> Text:
    """Read a UTF-8 file.

    Raises:
        InvalidRequestError: The file cannot be read or is not UTF-8.
    """
    try:
        data = path.read_bytes()
        return Text(path.name, hashlib.sha256(data).hexdigest(), data.decode())
    except OSError as error:
        raise InvalidRequestError("text", f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError("text", f"{path} is not UTF-8 text (byte {error.start})") from error


def shares(sequences: int, texts: int) -> list[int]:
    """Return how many of ``sequences`` each text gives: equally many, the first ones the rest."""
    return [sequences // texts + (index < sequences % texts) for index in range(texts)]


def cut(tokens: Tokens, count: int, length: int, name: str) -> Tokens:
    """Cut sequences that do not overlap, spread evenly over a text.

    Args:
        tokens: Of the whole text.
        count: How many sequences.
        length: Tokens of each.
        name: Name of the text, for the error.

    Returns:
        ``[count, length]``.

    Raises:
        InvalidRequestError: The text is too short.
    """
    if len(tokens) < count * length:
        raise InvalidRequestError(
            "text",
            f"{name} has {len(tokens)} tokens, but {count} sequences of {length} need {count * length}; "
            "give longer texts, or fewer or shorter sequences",
        )
    starts = [index * len(tokens) // count for index in range(count)]
    return np.array([tokens[start : start + length] for start in starts], dtype=np.int64).reshape(count, length)


def sequences_of(texts: list[Text], tokenizer: Any, count: int, length: int) -> Tokens:
    """Tokenize texts and cut ``count`` sequences out of them, as evenly shared between the texts as can be.

    A sequence starts with the token that the tokenizer starts every text with, if there is one: such models need it.

    Args:
        texts: The texts.
        tokenizer: A transformers tokenizer.
        count: Sequences over all texts; at least as many as there are texts.
        length: Tokens of each sequence.

    Returns:
        ``[count, length]``.

    Raises:
        InvalidRequestError: A text is too short, or there are more texts than sequences.
    """
    start = tokenizer.bos_token_id
    first = [start] if start is not None and start in tokenizer("")["input_ids"] else []
    bodies = cuts_of(texts, tokenizer, count, length - len(first))
    return np.concatenate([np.full((count, len(first)), start if first else 0), bodies], axis=1)


def cuts_of(texts: list[Text], tokenizer: Any, count: int, length: int) -> Tokens:
    """Tokenize texts and cut ``count`` pieces of ``length`` tokens out of them, with nothing before them.

    Returns:
        ``[count, length]``, in the order of the texts.

    Raises:
        InvalidRequestError: A text is too short, or there are more texts than pieces.
    """
    if count < len(texts):
        raise InvalidRequestError("sequences", f"must be at least the number of texts ({len(texts)}), got {count}")
    found = []
    for text, share in zip(texts, shares(count, len(texts)), strict=True):
        # Not verbose: a warning that the whole text is longer than the model's context would mislead.
        ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
        found.append(cut(np.array(ids, dtype=np.int64), share, length, text.name))
    return np.concatenate(found)
