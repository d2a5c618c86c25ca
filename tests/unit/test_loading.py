import json
import shutil

import pytest
import torch
from huggingface_hub import constants as hub
from safetensors.torch import load_file, save_file
from support.codec_data import statistics
from support.tiny_models import tiny_model
from support.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from transformers import MambaConfig, MambaForCausalLM

from scissorhands.errors import ConfigurationError, UnsupportedModelError
from scissorhands.formats import STATISTICS_FILE
from scissorhands.profile import Profile
from scissorhands_server.worker.fingerprint import model_fingerprint, tokenizer_fingerprint
from scissorhands_server.worker.loading import load


def save(folder, model, *, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or byte_level()).save_pretrained(folder)
    return folder


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "tiny-llama", tiny_model("llama_grouped"))


@pytest.fixture
def loaded(folder, tmp_path):
    return loading(folder, tmp_path)


def loading(model, tmp_path, **options):
    return load(str(model), cache_folder=tmp_path / "cache", **{"device": "cpu"} | options)


def test_a_folder_becomes_a_model_that_is_ready_to_serve(loaded):
    info = loaded.info
    assert (info.name, info.architecture) == ("tiny-llama", "LlamaForCausalLM")
    assert (info.layers, info.query_heads, info.kv_heads, info.head_dim) == (2, 4, 2, 8)
    assert (info.vocabulary, info.max_positions) == (97, 1024)
    assert (info.dtype, info.element_bytes) == ("float32", 4)
    assert len(info.fingerprint) == len(info.tokenizer_fingerprint) == 64
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer.decode(loaded.tokenizer("Hi é").input_ids) == "Hi é"


def test_the_weights_are_those_that_were_saved(loaded):
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny_model("llama_grouped")(ids).logits)


def test_it_can_be_served_under_another_name(folder, tmp_path):
    assert loading(folder, tmp_path, name="mine").info.name == "mine"


def test_every_end_of_sequence_id_counts(folder, tmp_path):
    assert loading(folder, tmp_path).eos_ids == {2}
    edit_json(folder / "generation_config.json", eos_token_id=[2, 5, 9])
    assert loading(folder, tmp_path).eos_ids == {2, 5, 9}


def test_without_a_generation_config_the_models_own_id_counts(folder, tmp_path):
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert loading(folder, tmp_path).eos_ids == {7}


def test_progress_is_told_in_order(folder, tmp_path):
    told = []
    loading(folder, tmp_path, progress=told.append)
    assert told == [
        "reading the configuration",
        "reading the tokenizer",
        "reading the weights",
        "computing the fingerprint",
    ]


def test_the_cpu_computes_in_float32_unless_told_otherwise(tmp_path):
    folder = save(tmp_path / "half", tiny_model("llama_grouped").to(torch.bfloat16))
    assert loading(folder, tmp_path).info.dtype == "float32"
    half = loading(folder, tmp_path, dtype="bfloat16")
    assert (half.info.dtype, half.info.element_bytes) == ("bfloat16", 2)
    assert half.model.dtype == torch.bfloat16


# --- Fingerprints -----------------------------------------------------------------------------------------------------


def test_the_fingerprint_does_not_depend_on_the_path_or_on_the_file_layout(folder, loaded, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "other-name")
    assert loading(moved, tmp_path).info.fingerprint == loaded.info.fingerprint
    shards = tmp_path / "shards"
    loaded.model.save_pretrained(shards, max_shard_size="8KB")
    byte_level().save_pretrained(shards)
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert loading(shards, tmp_path).info.fingerprint == loaded.info.fingerprint


def test_a_model_given_as_an_object_has_the_same_fingerprint(loaded):
    assert model_fingerprint(tiny_model("llama_grouped")) == loaded.info.fingerprint
    assert model_fingerprint(tiny_model("llama_grouped", seed=1)) != loaded.info.fingerprint


def test_one_changed_number_in_one_weight_changes_the_fingerprint(folder, loaded, tmp_path):
    weights = load_file(folder / "model.safetensors")
    last = max(weights)
    weights[last].view(-1)[-1] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert loading(folder, tmp_path).info.fingerprint != loaded.info.fingerprint


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"max_position_embeddings": 512}])
def test_a_changed_configuration_changes_the_fingerprint(folder, loaded, tmp_path, change):
    edit_json(folder / "config.json", **change)
    assert loading(folder, tmp_path).info.fingerprint != loaded.info.fingerprint


def test_another_number_type_is_another_model(folder, loaded, tmp_path):
    assert loading(folder, tmp_path, dtype="bfloat16").info.fingerprint != loaded.info.fingerprint


@pytest.mark.parametrize("name", ["qwen2", "opt", "gpt_neox"])
def test_other_architectures_load_with_the_fingerprint_of_the_object(name, tmp_path):
    model = tiny_model(name)
    assert loading(save(tmp_path / name, model), tmp_path).info.fingerprint == model_fingerprint(model)


def test_the_tokenizer_has_a_fingerprint_of_its_own(folder, loaded, tmp_path):
    other = byte_level(words=("more",))
    assert tokenizer_fingerprint(other) != loaded.info.tokenizer_fingerprint
    again = loading(save(tmp_path / "other", tiny_model("llama_grouped"), tokenizer=other), tmp_path)
    assert again.info.tokenizer_fingerprint == tokenizer_fingerprint(other)
    assert again.info.fingerprint == loaded.info.fingerprint
    templated = byte_level()
    templated.chat_template = CHAT_TEMPLATE
    assert tokenizer_fingerprint(templated) != loaded.info.tokenizer_fingerprint


# --- What cannot be loaded --------------------------------------------------------------------------------------------


def refused(model, tmp_path, error=ConfigurationError, **options):
    with pytest.raises(error) as caught:
        loading(model, tmp_path, **options)
    return str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing-here", "missing.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(model, tmp_path):
    message = refused(model, tmp_path)
    assert "no such folder or file" in message
    assert model in message


def test_no_model_is_an_error(tmp_path):
    assert "must be a folder" in refused("", tmp_path)


def test_an_unknown_hub_id_says_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    message = refused("nobody/nothing", tmp_path)
    assert "tried as a folder, as a file and as a hub id, offline because HF_HUB_OFFLINE is set" in message


def test_a_folder_with_only_a_gguf_file_says_to_name_the_file(tmp_path):
    (tmp_path / "some.gguf").touch()
    assert "it holds some.gguf: name the file itself" in refused(tmp_path, tmp_path)


def test_another_kind_of_file_says_to_name_its_folder(folder, tmp_path):
    assert "name its folder" in refused(folder / "model.safetensors", tmp_path)


@pytest.mark.parametrize(
    ("file", "what"),
    [("config.json", "configuration"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "weights")],
)
@pytest.mark.parametrize("damage", ["garbled", "empty"])
def test_a_damaged_file_is_named_for_what_it_is(folder, tmp_path, file, what, damage):
    (folder / file).write_bytes(b"" if damage == "empty" else (folder / file).read_bytes()[:200])
    assert f"cannot read its {what}" in refused(folder, tmp_path)


def test_weights_that_are_missing_are_not_made_up(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(folder, tmp_path)
    assert "1 missing keys, such as model.layers.1.mlp.up_proj.weight" in message


def test_weights_of_other_shapes_are_refused(folder, tmp_path):
    edit_json(folder / "config.json", intermediate_size=64)
    assert "weights" in refused(folder, tmp_path)


def test_pickled_weights_are_not_read(folder, tmp_path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "cannot read its weights" in refused(folder, tmp_path)


def test_code_that_comes_with_a_model_is_not_run(folder, tmp_path):
    (folder / "own.py").write_text("raise SystemExit('was run')")
    edit_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    assert "cannot read its configuration" in refused(folder, tmp_path)


def test_an_unknown_architecture_is_named(folder, tmp_path):
    edit_json(folder / "config.json", model_type="nonesuch")
    assert "nonesuch" in refused(folder, tmp_path)


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_read(tmp_path):
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4))
    folder = save(tmp_path / "mamba", model)
    (folder / "model.safetensors").unlink()
    assert "linear_attention" in refused(folder, tmp_path, UnsupportedModelError)


def test_unknown_number_types_and_devices_are_refused(folder, tmp_path, monkeypatch):
    assert "auto, float32, bfloat16, float16" in refused(folder, tmp_path, dtype="int8")
    assert "must be auto, cpu, cuda" in refused(folder, tmp_path, device="toaster")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device" in refused(folder, tmp_path, device="cuda")
    assert loading(folder, tmp_path, device="auto").model.device.type == "cpu"


def test_statistics_beside_the_model_are_loaded_with_it(folder, tmp_path, loaded):
    assert loaded.statistics is None
    statistics(8, 4).write(folder / STATISTICS_FILE)
    assert loading(folder, tmp_path).statistics.digest == statistics(8, 4).digest
    beside = tmp_path / "profile.json"
    Profile("", (0.1, 0.5), (((0.3, 0.1),) * 2,) * 2).save(beside, {})
    assert loading(folder, tmp_path, profile=beside).statistics.digest == statistics(8, 4).digest
    statistics(8, 4, rotary=False).write(tmp_path / STATISTICS_FILE)
    assert loading(folder, tmp_path, profile=beside).statistics.digest == statistics(8, 4, rotary=False).digest
    statistics(8, 2).write(folder / STATISTICS_FILE)
    with pytest.raises(ConfigurationError, match="with 2 KV heads of 8, this one has 4 of 8"):
        loading(folder, tmp_path)
