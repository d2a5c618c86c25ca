"""Writing a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

from pathlib import Path

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

END_OF_TURN = "<|eot|>"
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def tokens() -> list[str]:
    """Return a byte-level vocabulary of 262: special tokens, bytes, and pairs that a merge makes."""
    return ["<pad>", "<s>", "</s>", END_OF_TURN, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "ĊĊ"]


def write_gguf(
    path: Path, model: PreTrainedModel, *, pre: str = "smollm", chat_template: str = "", add_bos: bool = False
) -> Path:
    """Write ``model``, a Llama with the vocabulary of :func:`tokens`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tokens()
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([control if token.startswith("<") and token != "<" else normal for token in vocabulary])
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    if chat_template:
        writer.add_chat_template(chat_template)
    for name, weight in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _permuted(name, weight, model).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}"
    return _NAMES[name]


def _permuted(name: str, weight: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Return queries and keys with the pairs that RoPE rotates side by side, as llama.cpp has them."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for part, count in heads.items():
        if f".{part}." in name:
            rows, columns = weight.shape
            return weight.view(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns).contiguous()
    return weight
