"""Tiny causal language models whose layers slide, all or some of them; seeded, built in code."""

from collections.abc import Callable

import torch
from support.tiny_models import SPREAD, VOCABULARY
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WINDOW = 16

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gemma3() -> PreTrainedModel:
    """Gemma 3: sliding, global, sliding; each kind has its own rotary base, and scores are not scaled by head_dim."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_SIZES, num_hidden_layers=3, head_dim=8, query_pre_attn_scalar=16, layer_types=kinds)
    )


def qwen2() -> PreTrainedModel:
    """Qwen2: a global layer, then two sliding ones."""
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_hidden_layers=3, use_sliding_window=True, max_window_layers=1))


def mistral() -> PreTrainedModel:
    """Mistral: all layers slide."""
    return MistralForCausalLM(MistralConfig(**_SIZES, num_hidden_layers=2))


SLIDING_MODELS: dict[str, Callable[[], PreTrainedModel]] = {"gemma3": gemma3, "qwen2": qwen2, "mistral": mistral}


def sliding_model(name: str) -> PreTrainedModel:
    """Build a model of :data:`SLIDING_MODELS` in evaluation mode that never ends an answer by itself."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SLIDING_MODELS[name]().eval()
    model.generation_config.eos_token_id = None
    return model
