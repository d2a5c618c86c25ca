import pytest
from support.real_model import REAL_MODEL, require
from support.tiny_tokenizers import CHAT_TEMPLATE, byte_fallback, byte_level
from tokenizers import processors
from transformers import AutoTokenizer

from scissorhands.errors import InvalidRequestError
from scissorhands.v1 import generation_pb2 as pb
from scissorhands.v1 import model_pb2
from scissorhands_server.worker.prompt import prompt_ids

INFO = model_pb2.ModelInfo(vocabulary=100, max_positions=40)


def chat(*turns):
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns]))


@pytest.fixture
def tokenizer():
    return byte_level()


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def refused(request, tokenizer, info=INFO):
    with pytest.raises(InvalidRequestError) as caught:
        prompt_ids(request, tokenizer, info)
    return caught.value


def test_text_is_tokenized_as_it_is(tokenizer):
    ids = prompt_ids(pb.GenerateRequest(text=" Hi é"), tokenizer, INFO)
    assert tokenizer.decode(ids) == " Hi é"


def test_text_gets_the_special_tokens_that_the_tokenizer_adds(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    ids = prompt_ids(pb.GenerateRequest(text="Hi"), tokenizer, INFO)
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 3


def test_chat_goes_through_the_template_and_opens_the_answer(chat_tokenizer):
    ids = prompt_ids(chat(("user", "Hi"), ("assistant", "Yo"), ("user", "?")), chat_tokenizer, INFO)
    assert chat_tokenizer.decode(ids) == "[user]Hi[assistant]Yo[user]?[assistant]"


def test_a_template_adds_its_special_tokens_itself(chat_tokenizer):
    chat_tokenizer.chat_template = "<s>" + CHAT_TEMPLATE
    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", chat_tokenizer.bos_token_id)]
    )
    ids = prompt_ids(chat(("user", "Hi")), chat_tokenizer, INFO)
    assert ids.count(chat_tokenizer.bos_token_id) == 1


def test_token_ids_are_taken_as_they_are(tokenizer):
    assert prompt_ids(pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[99, 0, 7])), tokenizer, INFO) == [99, 0, 7]


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (pb.GenerateRequest(), "prompt", "one of text, chat or tokens"),
        (pb.GenerateRequest(text=""), "text", "empty"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt()), "tokens.ids", "at least one"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[1, 100])), "tokens.ids[1]", "below the vocabulary size of 100"),
        (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages", "at least one"),
        (chat(("user", "Hi"), ("robot", "Yo")), "chat.messages[1].role", "system, user, assistant"),
        (chat(("user", "Hi"), ("", "Yo")), "chat.messages[1].role", "system, user, assistant"),
        (chat(("system", "Be brief.")), "chat.messages", "no system turn"),
        (pb.GenerateRequest(text="x" * 40), "text", "at most 39"),
        (chat(("user", "x" * 40)), "chat", "at most 39"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[1] * 40)), "tokens", "at most 39"),
    ],
)
def test_bad_prompts_name_the_field_and_what_is_allowed(chat_tokenizer, request_, field, message):
    error = refused(request_, chat_tokenizer)
    assert error.field == field
    assert message in error.description


def test_a_prompt_one_token_below_the_positions_is_accepted(tokenizer):
    assert len(prompt_ids(pb.GenerateRequest(text="x" * 39), tokenizer, INFO)) == 39


def test_chat_without_a_template_is_refused_with_the_way_out(tokenizer):
    error = refused(chat(("user", "Hi")), tokenizer)
    assert error.field == "chat"
    assert "no chat template" in error.description


def test_a_template_that_fails_is_the_requests_error(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[1].content.missing.field }}"
    assert refused(chat(("user", "Hi")), chat_tokenizer).field == "chat.messages"


def test_a_text_that_becomes_no_token_is_empty():
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.pre_tokenizer = None
    tokenizer.backend_tokenizer.model.byte_fallback = False
    assert refused(pb.GenerateRequest(text="\u4e00"), tokenizer).field == "text"


@pytest.mark.real_model
def test_the_real_models_chat_template_is_the_one_it_was_tuned_with():
    tokenizer = AutoTokenizer.from_pretrained(require(REAL_MODEL))
    info = model_pb2.ModelInfo(vocabulary=49152, max_positions=8192)
    ids = prompt_ids(chat(("user", "Hi")), tokenizer, info)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # Each marker is one token, not its characters.
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
