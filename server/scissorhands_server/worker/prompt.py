"""From the prompt of a request to token ids."""

from typing import cast

import jinja2
from transformers import PreTrainedTokenizerBase

from scissorhands.errors import InvalidRequestError
from scissorhands.v1 import generation_pb2, model_pb2

ROLES = ("system", "user", "assistant")


def prompt_ids(
    request: generation_pb2.GenerateRequest, tokenizer: PreTrainedTokenizerBase, info: model_pb2.ModelInfo
) -> list[int]:
    """Return the token ids of a prompt: at least one, and few enough to leave room for an answer.

    Args:
        request: The request; one of its prompts is set.
        tokenizer: The model's tokenizer.
        info: The model's vocabulary and positions.

    Raises:
        InvalidRequestError: The prompt is missing, empty, malformed or too long.
    """
    kind = request.WhichOneof("prompt")
    if kind == "text":
        ids = _text_ids(request.text, tokenizer)
    elif kind == "chat":
        ids = _chat_ids(request.chat, tokenizer)
    elif kind == "tokens":
        ids = _checked_ids(request.tokens, info.vocabulary)
    else:
        raise InvalidRequestError("prompt", "set one of text, chat or tokens")
    if len(ids) >= info.max_positions:
        raise InvalidRequestError(
            kind,
            f"is {len(ids)} tokens long; the model has {info.max_positions} positions for prompt and answer, "
            f"so a prompt may have at most {info.max_positions - 1}",
        )
    return ids


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"] if text else []
    if not ids:
        raise InvalidRequestError("text", "must not be empty")
    return ids


def _chat_ids(chat: generation_pb2.ChatPrompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        raise InvalidRequestError("chat", "the model has no chat template; send text or tokens instead")
    if not chat.messages:
        raise InvalidRequestError("chat.messages", "must hold at least one message")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequestError(
                f"chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}, got {message.role!r}"
            )
    turns = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        made = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    except jinja2.TemplateError as error:  # Templates raise it on purpose, such as for roles that do not alternate.
        raise InvalidRequestError("chat.messages", f"the model's chat template refuses them: {error}") from error
    ids = cast("list[int]", made)  # What these arguments make it return.
    if not ids:
        raise InvalidRequestError("chat.messages", "the model's chat template makes an empty prompt of them")
    return ids


def _checked_ids(tokens: generation_pb2.TokenPrompt, vocabulary: int) -> list[int]:
    if not tokens.ids:
        raise InvalidRequestError("tokens.ids", "must hold at least one id")
    for index, token in enumerate(tokens.ids):
        if token >= vocabulary:
            raise InvalidRequestError(
                f"tokens.ids[{index}]", f"must be below the vocabulary size of {vocabulary}, got {token}"
            )
    return list(tokens.ids)
