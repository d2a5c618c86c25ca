"""Refusing, from its configuration alone, a model that this worker would not serve rightly.

What only a forward pass can show (attention that bypasses the interface, arguments that we do not know) is probed
where the attention function lives.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from scissorhands.errors import UnsupportedModelError
from scissorhands.layer_windows import layer_windows

# Attributes that, when they are set, change what a layer must remember, with what they mean.
_UNSERVED = {
    "kv_lora_rank": "multi-head latent attention, whose keys and values have other sizes",
    "num_kv_shared_layers": "layers that share their keys and values",
    "attention_chunk_size": "attention in chunks",
    "attn_logit_softcapping": "soft-capped scores",
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model whose layers are alike but for their windows.

    Args:
        layers: Attention layers.
        query_heads: Query heads per layer.
        kv_heads: Key-value heads per layer.
        head_dim: Elements of one key or value.
        max_positions: Most positions, in tokens; prompt and answer together.
        vocabulary: Token ids.
        layer_windows: Of :func:`scissorhands.layer_windows.layer_windows`.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    vocabulary: int
    layer_windows: tuple[int, ...] = ()


def check_config(config: PretrainedConfig) -> ModelSizes:
    """Return the sizes of a model that can be served.

    Raises:
        UnsupportedModelError: It cannot; the message says why.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; only causal models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{config.model_type} has no causal language model in transformers")
    text = config.get_text_config(decoder=True)
    windows = layer_windows(text, text.model_type)
    for name, meaning in _UNSERVED.items():
        if getattr(text, name, None):
            raise UnsupportedModelError(f"{text.model_type} uses {meaning} ({name}={getattr(text, name)})")
    return replace(_sizes(text), layer_windows=windows)


def check_model(model: nn.Module) -> None:
    """Refuse a model with a layer whose attention also looks ahead, such as a BERT that is no decoder.

    Raises:
        UnsupportedModelError: It has one; the message names it.
    """
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(model).__name__} is not causal: {name} looks ahead")


def _sizes(config: PretrainedConfig) -> ModelSizes:
    query_heads = _size(config, "num_attention_heads")
    kv_heads = query_heads
    if getattr(config, "num_key_value_heads", None) is not None:
        kv_heads = _size(config, "num_key_value_heads")
    elif getattr(config, "new_decoder_architecture", False):  # Falcon has names of its own.
        kv_heads = _size(config, "num_kv_heads")
    elif getattr(config, "multi_query", False):
        kv_heads = 1
    if query_heads % kv_heads:
        raise UnsupportedModelError(
            f"{config.model_type} has {query_heads} query heads, not a multiple of {kv_heads} KV heads"
        )
    if getattr(config, "head_dim", None) is not None:
        head_dim = _size(config, "head_dim")
    else:
        head_dim = _size(config, "hidden_size") // query_heads
    value_dim = getattr(config, "v_head_dim", None)
    if value_dim is not None and value_dim != head_dim:
        raise UnsupportedModelError(
            f"{config.model_type} has keys of {head_dim} and values of {value_dim} elements; they must be equal"
        )
    return ModelSizes(
        layers=_size(config, "num_hidden_layers"),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_size(config, "max_position_embeddings"),
        vocabulary=_size(config, "vocab_size"),
    )


def _size(config: PretrainedConfig, name: str) -> int:
    value: Any = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        raise UnsupportedModelError(f"{config.model_type} has layers that differ in {name}: {list(value)}")
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{config.model_type} does not say its {name} (got {value!r})")
    return value
