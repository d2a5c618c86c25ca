"""Tiny tokenizers built in code, one of each kind that cuts and joins text in its own way."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")
_SPECIAL_ROLES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def byte_level(words: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """Every byte is a token (GPT-2's way), and so is each of ``words``, special or not."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **_SPECIAL_ROLES)


def byte_fallback() -> PreTrainedTokenizerBase:
    """A few words and a token for each byte (Llama 2's way); decoding strips the first space."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "a", "▁a", "é", "."]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **_SPECIAL_ROLES)


def slow() -> PreTrainedTokenizerBase:
    """A tokenizer in plain Python, without the library behind the fast ones; every byte is a token."""
    return ByT5Tokenizer(extra_ids=0)
