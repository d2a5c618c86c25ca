"""From tokens to text, token by token."""

from transformers import PreTrainedTokenizerBase

# What decoders write for bytes that are no character, or not yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes a growing list of tokens without decoding it anew each time.

    A window of tokens is decoded with and without its newer part, and the difference is the new text: so spaces
    between words survive tokenizers that strip the first one. The window moves on only at whole characters.

    ``tokenizers.decoders.DecodeStream`` does the same for fast tokenizers, but with byte-fallback vocabularies it
    raises an untyped error on bytes that are no UTF-8, which a model may well produce.

    Args:
        tokenizer: The model's tokenizer.
        skip_special: Whether special tokens have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._old: list[int] = []  # Told already; the context of what follows.
        self._old_text = ""
        self._new: list[int] = []  # Not told yet.

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is whole with it."""
        self._new.append(token_id)
        text = self._decode(self._old + self._new)
        if len(text) <= len(self._old_text) or text.endswith(_REPLACEMENT):
            return ""
        told = text[len(self._old_text) :]
        self._old, self._new = self._new, []
        self._old_text = self._decode(self._old)
        return told

    def finish(self) -> str:
        """Return what was held back."""
        text = self._decode(self._old + self._new)
        told = text[len(self._old_text) :]
        self._old, self._old_text, self._new = [], "", []
        return told

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces looks at what follows, which is not known yet.
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # It is a list only for a list of lists.
        return text
