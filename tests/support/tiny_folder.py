"""A folder with a tiny model, its tokenizer and a text: what the command line takes."""

from pathlib import Path

import torch
from support.tiny_models import SPREAD
from support.tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_folder(folder: Path, positions: int = 128, chat_template: str | None = None, head_dim: int = 8) -> Path:
    """Write ``model`` and ``text.txt`` (800 tokens, one for each byte) into a folder, and return it."""
    tokenizer = byte_level()
    if chat_template:
        tokenizer.chat_template = chat_template
    config = LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        initializer_range=SPREAD,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("It is a truth universally acknowledged. " * 20, encoding="utf-8")
    return folder
