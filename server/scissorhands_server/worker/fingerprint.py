"""Fingerprints: what tells two models, or two tokenizers, apart wherever they were loaded from."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Parts of a configuration that do not change what the model computes: where it came from, who wrote the file, and the
# number type, which the weights carry themselves.
_IGNORED = {
    "_attn_implementation",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
}
# hashlib releases the interpreter's lock, so tensors are hashed side by side.
_THREADS = 4


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the hex SHA-256 over the architecture, the configuration and every weight as it is in memory.

    A weight counts with its name, number type, shape and bytes, so the same checkpoint loaded in another number type
    is another model: it computes other keys and values.
    """
    state = sorted(model.state_dict().items())
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_tensor_digest, (tensor for _, tensor in state)))
    total = hashlib.sha256()
    total.update(_line(type(model).__name__, _canonical(model.config.to_dict())))
    for (name, tensor), digest in zip(state, digests, strict=True):
        total.update(_line(name, str(tensor.dtype), list(tensor.shape), digest))
    return total.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hex SHA-256 over everything that decides which ids a text becomes."""
    if tokenizer.is_fast:
        rules: Any = json.loads(tokenizer.backend_tokenizer.to_str())
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(_line(rules, tokenizer.special_tokens_map, tokenizer.chat_template)).hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> str:
    # Viewed as bytes, because numpy has no bfloat16.
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items() if key not in _IGNORED}
    return value


def _line(*parts: Any) -> bytes:
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str).encode() + b"\n"
