"""Telling a cache what kinds of tokens it holds: special, punctuation, or other.

Only the tokenizer knows, and a cache never sees token ids. So :func:`tell_kinds` hooks into a model once, where it is
loaded; from then on every forward pass over a cache of ours tells the cache the kinds of the pass's tokens, whoever
runs it: the worker, an evaluation, or ``generate``.
"""

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scissorhands.snapshot import TokenKind
from scissorhands.view import StepView

Kinds = npt.NDArray[np.uint8]

# On a model that tells.
_ATTRIBUTE = "_scissorhands_tells_kinds"


def token_kinds(tokenizer: PreTrainedTokenizerBase) -> Kinds:
    """Return ``[tokens of the tokenizer]`` uint8, the :class:`~scissorhands.snapshot.TokenKind` of each token id.

    Special is what the tokenizer marks as special. Punctuation is a token whose text, without the spaces around it, is
    made of Unicode's punctuation alone (categories P*), such as ``.``, ``:``, ``?`` and ``..."``.
    """
    kinds = np.full(len(tokenizer), TokenKind.OTHER, dtype=np.uint8)
    for token_id, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        # Decoding takes a while for a whole vocabulary, and most tokens have a plain letter or digit.
        if token is None or any(character.isascii() and character.isalnum() for character in token):
            continue
        if _is_punctuation(str(tokenizer.decode([token_id]))):
            kinds[token_id] = TokenKind.PUNCTUATION
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
    kinds[sorted(special)] = TokenKind.SPECIAL
    return kinds


def tell_kinds(model: PreTrainedModel, kinds: Kinds) -> None:
    """Let every forward pass of a model over a cache of ours tell the kinds of its tokens.

    A pass that is given embeddings instead of token ids tells nothing.

    Args:
        model: The model. Telling it again changes nothing.
        kinds: ``[tokens]`` uint8, kind of each token id, as :func:`token_kinds` finds them.
    """
    if hasattr(model, _ATTRIBUTE):
        return
    # A model may know more ids than its tokenizer: they pad its matrices to a round size.
    beyond = max(0, int(model.config.get_text_config(decoder=True).vocab_size) - len(kinds))
    table = torch.from_numpy(np.pad(kinds, (0, beyond), constant_values=TokenKind.OTHER))

    def tell(module: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        del module
        ids = named.get("input_ids", positional[0] if positional else None)
        for view in named.values():
            if isinstance(view, StepView):
                view.kinds = None if ids is None else table.to(ids.device)[ids]

    model.register_forward_pre_hook(tell, with_kwargs=True)
    setattr(model, _ATTRIBUTE, True)


def _is_punctuation(text: str) -> bool:
    stripped = text.strip()
    return bool(stripped) and all(unicodedata.category(character).startswith("P") for character in stripped)
