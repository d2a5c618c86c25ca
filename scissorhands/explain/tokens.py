"""The text of each token of a sequence, so that all of them joined are the whole text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from scissorhands.detokenizer import Detokenizer


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included.

    A character that several tokens make up belongs to the last of them; the others are empty.
    """
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    texts = [detokenizer.push(token) for token in ids]
    texts[-1] += detokenizer.finish()
    return texts
