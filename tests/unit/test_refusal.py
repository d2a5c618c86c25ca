import pytest
import torch
import transformers
from support.tiny_models import TINY_MODELS, tiny_model
from transformers import (
    BartConfig,
    BertConfig,
    BertLMHeadModel,
    CLIPConfig,
    DeepseekV3Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from scissorhands.errors import UnsupportedModelError
from scissorhands_server.worker.refusal import ModelSizes, check_config, check_model

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# What the sizes above mean for every architecture that is served.
SERVED = ModelSizes(layers=2, query_heads=4, kv_heads=4, head_dim=8, max_positions=64, vocabulary=97)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, max_position_embeddings=64),
        Qwen2Config(**SIZES, max_position_embeddings=64, num_key_value_heads=4),
        Qwen2Config(
            **SIZES, max_position_embeddings=64, num_key_value_heads=4, use_sliding_window=False, sliding_window=8
        ),
        OPTConfig(**SIZES, max_position_embeddings=64),
        GPTNeoXConfig(**SIZES, max_position_embeddings=64),
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        MistralConfig(**SIZES, max_position_embeddings=64, num_key_value_heads=4, head_dim=8, sliding_window=None),
        Phi3Config(**SIZES, max_position_embeddings=64, pad_token_id=0),
        Gemma3TextConfig(
            **SIZES,
            max_position_embeddings=64,
            num_key_value_heads=4,
            head_dim=8,
            layer_types=["full_attention", "full_attention"],
        ),
        GPTNeoConfig(
            vocab_size=97,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global"], 2]],
            max_position_embeddings=64,
        ),
        FalconConfig(**SIZES, max_position_embeddings=64, multi_query=False),
    ],
    ids=lambda config: config.model_type,
)
def test_models_of_full_attention_are_served(config):
    assert check_config(config) == SERVED


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (LlamaConfig(**SIZES, num_key_value_heads=2), 2),
        (FalconConfig(**SIZES, multi_query=True), 1),
        (FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2), 2),
        (GPTBigCodeConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, multi_query=True), 1),
    ],
)
def test_kv_heads_are_found_under_every_name(config, heads):
    assert check_config(config).kv_heads == heads


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LlamaConfig(**SIZES), ()),
        (
            Qwen2Config(**SIZES, num_key_value_heads=4, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            (0, 8),
        ),
        (Qwen2Config(**SIZES, num_key_value_heads=4, use_sliding_window=False, sliding_window=8), ()),
        (MistralConfig(**SIZES, num_key_value_heads=4, sliding_window=4096), (4096, 4096)),
        (MistralConfig(**SIZES, num_key_value_heads=4, sliding_window=None), ()),
        (Phi3Config(**SIZES, pad_token_id=0, sliding_window=2047), (2047, 2047)),
        (Gemma3TextConfig(**SIZES, num_key_value_heads=1, sliding_window=512, sliding_window_pattern=2), (512, 0)),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_windows_are_those_of_the_configuration(config, windows):
    assert check_config(config).layer_windows == windows


def test_a_head_may_be_wider_than_its_share_of_the_hidden_size():
    assert check_config(Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (BartConfig(), "encoder-decoder"),
        (ViTConfig(), "no causal language model"),
        (CLIPConfig(), "no causal language model"),
        (Gemma2Config(), "soft-capped scores"),
        (Gemma3TextConfig(sliding_window=None), "does not say its sliding_window"),
        (Llama4TextConfig(), "chunked_attention"),
        (GPTNeoConfig(), "local"),
        (MambaConfig(), "linear_attention"),
        (JambaConfig(), "linear_attention"),
        (FalconH1Config(), "hybrid"),
        (RwkvConfig(), "num_attention_heads"),
        (DeepseekV3Config(), "latent attention"),
        (MptConfig(), "max_position_embeddings"),
        (LlamaConfig(**SIZES, num_key_value_heads=3), "not a multiple"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_cannot_be_served_rightly_is_refused_with_the_reason(config, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_key_value_heads", [4, 2], "differ in num_key_value_heads: \\[4, 2\\]"),
        ("num_attention_heads", (4, 2), "differ in num_attention_heads"),
        ("num_hidden_layers", None, "does not say its num_hidden_layers"),
        ("max_position_embeddings", -1, "does not say its max_position_embeddings"),
        ("vocab_size", 0, "does not say its vocab_size"),
        ("v_head_dim", 16, "keys of 8 and values of 16"),
        ("num_kv_shared_layers", 1, "share their keys"),
        ("attention_chunk_size", 8, "in chunks"),
    ],
)
def test_sizes_that_are_missing_or_differ_between_layers_are_refused(name, value, reason):
    config = LlamaConfig(**SIZES)
    object.__setattr__(config, name, value)  # Past the checks of transformers' own.
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_causal_models_pass(name):
    check_model(tiny_model(name))


def test_a_model_that_looks_ahead_is_refused():
    torch.manual_seed(0)
    config = BertConfig(**SIZES, intermediate_size=8, max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match="looks ahead"):
        check_model(BertLMHeadModel(config))


def test_the_sizes_are_those_of_the_weights():
    for name in TINY_MODELS:
        model = tiny_model(name)
        sizes = check_config(model.config)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([[3, 4, 5]]), cache=cache)
        assert len(cache.layers) == sizes.layers
        assert cache.layers[0].keys.shape == (1, sizes.kv_heads, 3, sizes.head_dim)
        assert cache.layers[0].values.shape == (1, sizes.kv_heads, 3, sizes.head_dim)
