"""Tiny causal language models with seeded weights, built in code: no download, a few milliseconds a step."""

from collections.abc import Callable

import numpy as np
import torch
from support.dense_policies import kind_of
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from scissorhands.kinds import tell_kinds

VOCABULARY = 97
POSITIONS = 1024
# At the usual 0.02 attention of an untrained model is almost even. At this spread some tokens matter and most do not.
SPREAD = 0.25

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama_grouped() -> PreTrainedModel:
    """Llama with two query heads to a key-value head."""
    return LlamaForCausalLM(LlamaConfig(**_SIZES, intermediate_size=48, num_key_value_heads=2))


def llama_wide() -> PreTrainedModel:
    """Llama with heads that are large enough for the kernels of a GPU."""
    return LlamaForCausalLM(LlamaConfig(**_SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=16))


def llama_multi_head() -> PreTrainedModel:
    """Llama with as many key-value heads as query heads."""
    return LlamaForCausalLM(LlamaConfig(**_SIZES, intermediate_size=48, num_key_value_heads=4))


def qwen2() -> PreTrainedModel:
    """Qwen2: grouped queries, and biases on queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, intermediate_size=48, num_key_value_heads=2))


def opt() -> PreTrainedModel:
    """OPT: learned positions that are added to the embeddings."""
    sizes = {name: size for name, size in _SIZES.items() if name != "initializer_range"}
    return OPTForCausalLM(OPTConfig(**sizes, init_std=SPREAD, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0))


def gpt_neox() -> PreTrainedModel:
    """GPT-NeoX: rotary positions on a quarter of each head, attention and MLP side by side."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES, intermediate_size=48))


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama_grouped": llama_grouped,
    "llama_multi_head": llama_multi_head,
    "qwen2": qwen2,
    "opt": opt,
    "gpt_neox": gpt_neox,
}


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a model by name, in evaluation mode; the caller's random state is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (TINY_MODELS | {"llama_wide": llama_wide})[name]().eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):  # They start at zero, and a forgotten one would not be noticed.
                torch.nn.init.normal_(parameter, std=SPREAD / 2)
    tell_kinds(model, np.array([kind_of(token) for token in range(VOCABULARY)], dtype=np.uint8))
    return model


def random_tokens(count: int, seed: int) -> torch.Tensor:
    """Return ``[count]`` token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator)


def eager_attention(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return what each query gives each token, by transformers: of each layer ``[sequences, kv_heads, query, token]``.

    The model is ``llama_grouped``, its two query heads of a group averaged.
    """
    model = tiny_model("llama_grouped")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found = model(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    return [layer.unflatten(1, (2, 2)).mean(dim=2) for layer in found]
