import pytest
import torch
from support.real_model import REAL_GGUF, REAL_MODEL, require

from scissorhands.v1 import generation_pb2 as pb
from scissorhands_server.worker.loading import load
from scissorhands_server.worker.prompt import prompt_ids
from scissorhands_server.worker.sampling import Sampler, SamplingParameters
from scissorhands_server.worker.text import TextStream

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def converted(folder, told):
    return load(str(require(REAL_GGUF)), device="cpu", cache_folder=folder, progress=told.append)


def answer(loaded, request, tokens):
    """Decode greedily, without a cache budget, with the worker's own parts."""
    ids = prompt_ids(request, loaded.tokenizer, loaded.info)
    sampler, stream, text, cache, new = Sampler(SamplingParameters()), TextStream(loaded.tokenizer), "", None, ids
    for _ in range(tokens):
        with torch.no_grad():
            output = loaded.model(torch.tensor([new]), cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        token = sampler.next(output.logits[0, -1], ids)
        if token in loaded.eos_ids:
            break
        text += stream.push(token).text
        ids.append(token)
        new = [token]
    return text + stream.finish()


def test_the_file_is_converted_on_the_first_load(converted, told):
    assert any("unpacking 272 tensors" in line for line in told)
    info = converted.info
    assert info.name == "SmolLM2-135M-Instruct.Q4_1"
    assert (info.layers, info.query_heads, info.kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.max_positions, info.vocabulary, info.dtype) == (8192, 49152, "float32")
    assert converted.eos_ids == {converted.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_what_it_says_is_sensible(converted):
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
    assert "Paris" in answer(converted, pb.GenerateRequest(chat=chat), 16)
    text = answer(converted, pb.GenerateRequest(text="1, 2, 3, 4, 5, 6,"), 12)
    assert text.startswith(" 7, 8, 9, 10")


def test_the_second_load_takes_the_conversion_from_the_cache(converted, folder):
    (conversion,) = [path for path in (folder / "gguf").iterdir() if path.is_dir()]
    before = {path.name: path.stat().st_mtime_ns for path in conversion.iterdir()}
    told = []
    again = load(str(REAL_GGUF), device="cpu", cache_folder=folder, progress=told.append)
    assert not any("converting" in line for line in told)
    assert {path.name: path.stat().st_mtime_ns for path in conversion.iterdir()} == before
    assert again.info == converted.info


def test_the_model_that_make_model_converts_is_the_same_one(converted, folder):
    made = load(str(require(REAL_MODEL)), device="cpu", cache_folder=folder)
    assert made.info.fingerprint == converted.info.fingerprint
    assert made.info.tokenizer_fingerprint == converted.info.tokenizer_fingerprint
    assert made.info.name == "smollm2-135m-instruct"
