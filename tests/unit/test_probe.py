"""The probe: which models may be served, and why the others may not."""

import pytest
import torch
import transformers
from support.sliding_models import SLIDING_MODELS, WINDOW, sliding_model
from support.tiny_models import TINY_MODELS, random_tokens, tiny_model

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.errors import UnsupportedModelError
from scissorhands.probe import model_shape, probe
from scissorhands.span import RingSpan

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def mistral(window):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=window))


def qwen2_moe():
    """Make a mask for sliding windows that no layer uses, and ask for router logits."""
    config = transformers.Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    )
    return transformers.Qwen2MoeForCausalLM(config)


def llama4_chunked():
    """Attend in chunks, and tell nobody but the mask."""
    config = transformers.Llama4TextConfig(
        **SIZES,
        head_dim=8,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=48,
        num_local_experts=2,
        use_qk_norm=False,
    )
    return transformers.Llama4ForCausalLM(config)


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW))


def gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2
    )
    return transformers.GptOssForCausalLM(config)


def bloom():
    """Add a bias by distance, outside of the attention interface."""
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))


def mamba():
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    )


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_models_that_we_serve_pass(name):
    model = tiny_model(name)
    probe(model)
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("build", [gpt2, lambda: mistral(None), qwen2_moe], ids=["gpt2", "mistral", "qwen2_moe"])
def test_others_pass_that_attend_alike(build):
    probe(seeded(build))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (llama4_chunked, "layers of type chunked_attention"),
        (gemma2, "Gemma2Attention asks .* soft-capped scores"),
        (gpt_oss, "GptOssAttention asks .* attention sinks"),
        (bloom, r"calls per layer: \[0, 0\]"),
        (mamba, "lacks num_attention_heads"),
    ],
    ids=["llama4", "gemma2", "gpt_oss", "bloom", "mamba"],
)
def test_what_would_be_served_wrongly_is_refused_and_left_as_it_was(build, reason):
    model = seeded(build)
    before = model.config._attn_implementation
    ids = random_tokens(12, seed=0).unsqueeze(0)
    expected = logits(model, ids)
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*{reason}"):
        probe(model)
    assert model.config._attn_implementation == before
    assert torch.equal(logits(model, ids), expected)


def test_a_cache_for_such_a_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="soft-capped"):
        BudgetedCache(seeded(gemma2), BudgetRequest.tokens(64))


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_models_whose_layers_slide_pass(name):
    model = sliding_model(name)
    probe(model)
    assert max(model_shape(model).layer_windows) == WINDOW


@pytest.mark.parametrize("part", ["visible", "visible_of_one"])
def test_a_window_that_is_served_wrongly_shows_in_the_logits(part, monkeypatch):
    # A ring that has forgotten a token too many, in a chunk or with a single token.
    right = getattr(RingSpan, part).func

    def forgetful(ring):
        mask = right(ring)
        seen = torch.ones(1, 1, 1, WINDOW, dtype=torch.bool) if mask is None else mask.clone()
        seen[..., :WINDOW] &= torch.arange(WINDOW) % 5 > 0
        return seen

    monkeypatch.setattr(RingSpan, part, property(forgetful))
    with pytest.raises(UnsupportedModelError, match="logits differ from transformers' own attention by"):
        probe(sliding_model("gemma3"))


def test_a_window_unlike_the_configuration_is_refused():
    model = sliding_model("qwen2")
    model.config.layer_types = ["full_attention", "full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModelError, match=f"Qwen2Attention attends within {WINDOW} tokens, .* says all"):
        probe(model)


def test_a_sliding_layer_without_a_window_is_refused():
    model = sliding_model("gemma3")
    model.config.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="does not say its sliding_window"):
        probe(model)


def test_a_hidden_change_to_the_scores_shows_in_the_logits():
    # The model attends through the interface, but adds something that we are not told of.
    model = tiny_model("llama_grouped")
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def biased(*args, **kwargs):
        output, weights = plain(*args, **kwargs)
        return output + (0.5 if model.config._attn_implementation == "eager" else 0.0), weights

    attention.forward = biased
    with pytest.raises(UnsupportedModelError, match="logits differ from transformers' own attention by"):
        probe(model)


def test_a_layer_that_attends_twice_is_refused():
    model = tiny_model("llama_grouped")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match=r"calls per layer: \[2, 0\]"):
        probe(model)


def test_a_layer_beyond_the_configuration_is_refused():
    model = tiny_model("llama_grouped")
    model.model.layers[1].self_attn.layer_idx = 5
    with pytest.raises(UnsupportedModelError, match="layer 5 attends, but the configuration has 2 layers"):
        probe(model)


def test_logits_that_are_no_numbers_are_refused():
    model = tiny_model("llama_grouped")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="differ from transformers' own attention by nan"):
        probe(model)


def test_a_failure_without_a_message_is_refused_too():
    model = tiny_model("llama_grouped")

    def fail(*args):
        if model.config._attn_implementation == NAME:
            raise RuntimeError

    model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModelError, match="cannot be served: RuntimeError"):
        probe(model)


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [("llama_grouped", 2), ("llama_multi_head", 4), ("qwen2", 2), ("opt", 4), ("gpt_neox", 4)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_shape_is_read_from_the_configuration(name, kv_heads, dtype):
    shape = model_shape(tiny_model(name).to(dtype))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.element_bytes) == (2, kv_heads, 8, dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_passes(dtype):
    probe(tiny_model("llama_grouped").to(dtype))


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()


@torch.inference_mode()
def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits
