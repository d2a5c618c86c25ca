import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.tiny_gguf import END_OF_TURN, tokens, write_gguf
from support.tiny_tokenizers import CHAT_TEMPLATE
from transformers import LlamaConfig, LlamaForCausalLM

from scissorhands.errors import ConfigurationError, UnsupportedModelError
from scissorhands_server.worker.gguf_conversion import convert
from scissorhands_server.worker.loading import load


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokens()),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                initializer_range=0.25,
            )
        ).eval()


def loading(path, tmp_path, told=None):
    return load(
        str(path), device="cpu", cache_folder=tmp_path / "cache", progress=[].append if told is None else told.append
    )


def conversions(tmp_path):
    return [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]


def test_the_model_is_the_one_that_was_written(model, tmp_path):
    loaded = loading(write_gguf(tmp_path / "tiny.gguf", model), tmp_path)
    ids = torch.tensor([[5, 60, 200, 7, 5]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.info.name == "tiny"
    assert (loaded.info.kv_heads, loaded.info.max_positions, loaded.info.vocabulary) == (2, 128, 262)


def test_every_id_that_ends_a_turn_ends_an_answer(model, tmp_path):
    loaded = loading(write_gguf(tmp_path / "tiny.gguf", model), tmp_path)
    assert loaded.eos_ids == {2, 3}
    assert loaded.tokenizer.convert_ids_to_tokens([2, 3]) == ["</s>", END_OF_TURN]


def test_the_tokenizer_keeps_its_template_and_its_special_tokens(model, tmp_path):
    tokenizer = loading(write_gguf(tmp_path / "tiny.gguf", model, chat_template=CHAT_TEMPLATE), tmp_path).tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer(f"a{END_OF_TURN}").input_ids[-1] == 3
    assert tokenizer.decode([3], skip_special_tokens=True) == ""
    text = " Hi  é日🙂\n\n1 2\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(("add_bos", "start"), [(True, [1]), (False, [])])
def test_the_beginning_is_marked_if_the_file_says_so(model, tmp_path, add_bos, start):
    tokenizer = loading(write_gguf(tmp_path / "tiny.gguf", model, add_bos=add_bos), tmp_path).tokenizer
    assert tokenizer("a").input_ids == [*start, tokens().index("a")]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        # Every digit by itself, so what stands before it stays together.
        ("smollm", ["ĠĠ", "1", "2", "ĊĊ", "3"]),
        # GPT-2's rule: the last space or line break goes with what follows, or stands alone.
        ("gpt-2", ["Ġ", "Ġ", "1", "2", "Ċ", "Ċ", "3"]),
    ],
)
def test_digits_are_cut_as_the_vocabulary_was_learned(model, tmp_path, pre, cut):
    tokenizer = loading(write_gguf(tmp_path / "tiny.gguf", model, pre=pre), tmp_path).tokenizer
    assert tokenizer.tokenize("  12\n\n3") == cut


@pytest.mark.parametrize(("pre", "warned"), [("brand-new", True), ("smollm", False), ("llama-bpe", False)])
def test_an_unknown_rule_for_cutting_text_is_told(model, tmp_path, caplog, pre, warned):
    with caplog.at_level(logging.WARNING, "scissorhands_server"):
        loading(write_gguf(tmp_path / "tiny.gguf", model, pre=pre), tmp_path)
    assert ("brand-new" in caplog.text) == warned


def test_a_file_is_converted_once_whatever_its_name(model, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", model)
    told = []
    first = loading(path, tmp_path, told)
    assert sum("writing safetensors" in line for line in told) == 1
    told.clear()
    again = loading(path, tmp_path, told)
    assert not any("converting" in line for line in told)
    assert again.info == first.info
    assert len(conversions(tmp_path)) == 1
    # No partial folder, and readable by another user, such as a container's.
    (folder,) = conversions(tmp_path)
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in folder.iterdir())


def test_a_file_whose_content_changed_is_converted_again(model, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", model)
    first = loading(path, tmp_path)
    size = path.stat().st_size
    with torch.no_grad():
        other = LlamaForCausalLM(model.config)
        other.load_state_dict({name: weight * 2 for name, weight in model.state_dict().items()})
    write_gguf(path, other)
    assert path.stat().st_size == size
    assert loading(path, tmp_path).info.fingerprint != first.info.fingerprint
    assert len(conversions(tmp_path)) == 2


def test_an_interrupted_conversion_is_done_again(model, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", model)
    target = tmp_path / "target"
    partial = tmp_path / ".target.partial"
    partial.mkdir()
    (partial / "leftover").touch()
    convert(path, target, lambda _: None)
    assert not partial.exists()
    assert not (target / "leftover").exists()
    assert (target / "model.safetensors").exists()


def test_two_workers_that_start_at_once_convert_once(model, tmp_path):
    path, told = write_gguf(tmp_path / "tiny.gguf", model), []
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: convert(path, tmp_path / "target", told.append), range(2)))
    assert sum("writing safetensors" in line for line in told) == 1


def test_a_conversion_of_an_older_format_is_replaced(model, tmp_path):
    path, target = write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "target"
    convert(path, target, lambda _: None)
    manifest = json.loads((target / "conversion.json").read_text())
    (target / "conversion.json").write_text(json.dumps(manifest | {"format": 0}))
    (target / "leftover").touch()
    told = []
    convert(path, target, told.append)
    assert told
    assert json.loads((target / "conversion.json").read_text()) == manifest
    assert not (target / "leftover").exists()


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF\x03\x00\x00\x00"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"bad\.gguf"):
        loading(path, tmp_path)
    assert conversions(tmp_path) == []


def test_a_truncated_file_is_refused(model, tmp_path):
    path = write_gguf(tmp_path / "cut.gguf", model)
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    with pytest.raises(UnsupportedModelError, match=r"cut\.gguf"):
        loading(path, tmp_path)
    assert conversions(tmp_path) == []


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        convert(tmp_path / "missing.gguf", tmp_path / "target", lambda _: None)
