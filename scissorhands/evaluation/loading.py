"""Loading a model for evaluation, from a folder or the Hugging Face hub."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from scissorhands.codec.statistics import attach, find
from scissorhands.errors import InvalidRequestError
from scissorhands.kinds import tell_kinds, token_kinds
from scissorhands.probe import probe


def load(model: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, and switch the model to our attention.

    Args:
        model: A folder or a hub id. No code that comes with a model is run, and nothing is unpickled.
        dtype: A torch type, or ``auto``: float32 on the CPU, else the checkpoint's own.
        device: A torch device, or ``auto``: the first CUDA device if there is one, else the CPU.

    Raises:
        InvalidRequestError: The model cannot be read, its weights do not fit, or there is no such device.
        UnsupportedModelError: The model would not be served rightly.
    """
    place = _device(device)
    kind = dtype if dtype != "auto" or place.type != "cpu" else "float32"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        # Its types do not know that it returns a pair when the report is asked for.
        pair: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=kind, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequestError("model", f"cannot load {model!r} as a folder or a hub id: {reason}") from error
    loaded, report = pair
    # transformers fills what it does not find with random numbers, and says so in a log line.
    unfit = sorted(str(key) for problem in ("missing_keys", "mismatched_keys") for key in report[problem])
    if unfit:
        raise InvalidRequestError("model", f"the weights of {model!r} do not fit its configuration, such as {unfit[0]}")
    loaded.requires_grad_(requires_grad=False)
    loaded.to(place)
    probe(loaded)
    tell_kinds(loaded, token_kinds(tokenizer))
    attach(loaded, find(Path(model)))
    return loaded, tokenizer


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model's parameters, so that results of other weights are not mistaken for its own."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA.
        raise InvalidRequestError("device", f"{device!r} cannot be used: {str(error).splitlines()[0]}") from error
