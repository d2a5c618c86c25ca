"""Converting a GGUF file, once, into a folder that transformers loads like any other.

transformers unpacks the weights and rebuilds the tokenizer from the file's metadata; unpacking takes many times as long
as loading the result. Two facts in the metadata get lost on the way and are put back here:

- how digits are cut. Some vocabularies (``tokenizer.ggml.pre`` of ``smollm``, ``starcoder`` and others) were learned
  with every digit on its own; without that rule a space or line break before a digit becomes other tokens.
- the ids that end a turn (``eot_token_id``, ``eom_token_id``), which end an answer just as ``eos_token_id`` does.
"""

import hashlib
import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from scissorhands.errors import ConfigurationError, UnsupportedModelError

Progress = Callable[[str], None]

_LOG = logging.getLogger(__name__)

# Raise it when what a conversion writes changes, so that older ones are done again.
_FORMAT = 1
_MANIFEST = "conversion.json"
# Another process may be converting the same file; large ones take minutes.
_LOCK_SECONDS = 1800.0

# Values of tokenizer.ggml.pre whose vocabularies were learned with every digit on its own, then GPT-2's rule.
_SINGLE_DIGITS = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
# Those with GPT-2's rule alone, which is what transformers falls back on.
_LIKE_GPT2 = {"gpt-2", "jais", "mpt", "olmo", "phi-2"}

# What transformers and numpy raise on a file that is damaged or of a kind that they do not know.
_READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError, RuntimeError, struct.error)


def converted(source: Path, cache_folder: Path, progress: Progress) -> Path:
    """Return the folder with the conversion of ``source``, converting it if it is not there yet.

    The folder is named by the file's content, so a file that moves is found again and one that changes is not.

    Raises:
        ConfigurationError: The file cannot be read, or another process takes too long to convert it.
        UnsupportedModelError: transformers cannot convert this kind of file.
    """
    digest = _digest(source)
    target = cache_folder / "gguf" / f"{source.stem}-{digest[:16]}"
    _convert(source, digest, target, progress)
    return target


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Convert ``source`` into the folder ``target``, unless that is what it holds already.

    Raises:
        ConfigurationError: The file cannot be read, or another process takes too long to convert it.
        UnsupportedModelError: transformers cannot convert this kind of file.
    """
    _convert(source, _digest(source), target, progress)


def _convert(source: Path, digest: str, target: Path, progress: Progress) -> None:
    manifest = {"format": _FORMAT, "source_sha256": digest, "transformers": transformers.__version__}
    if _is_done(target, manifest):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_SECONDS):
            if _is_done(target, manifest):
                return
            shutil.rmtree(partial, ignore_errors=True)  # Of a conversion that was interrupted.
            try:
                _write(source, partial, manifest, progress)
                shutil.rmtree(target, ignore_errors=True)  # Of an older format.
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except Timeout as error:
        raise ConfigurationError(
            f"model {str(source)!r}: another process has held {error.lock_file} for {_LOCK_SECONDS:.0f} s"
        ) from error


def _is_done(target: Path, manifest: dict[str, Any]) -> bool:
    try:
        found = json.loads((target / _MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == manifest)


def _digest(source: Path) -> str:
    try:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigurationError(f"model {str(source)!r}: cannot be read: {error.strerror}") from error


def _write(source: Path, folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    progress(f"converting {source.name}, once: reading its header")
    try:
        metadata, tensors = read_gguf_metadata(str(source))
        # A file of plain floats keeps its number type; blocks unpack to float32, which holds them exactly.
        dtype = GgufHeader.from_file(str(source)).dtype or torch.float32
        progress(f"converting {source.name}, once: rebuilding the tokenizer")
        tokenizer = _tokenizer(source, metadata)
        progress(f"converting {source.name}, once: unpacking {len(tensors)} tensors")
        model = _model(source, dtype, metadata)
        progress(f"converting {source.name}, once: writing safetensors")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for file in folder.iterdir():
            file.chmod(0o644)  # The weights are written for the owner alone, and a container runs as someone else.
    except OSError as error:
        raise ConfigurationError(f"model {str(source)!r}: cannot write its conversion: {error}") from error
    except _READ_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(f"model {str(source)!r}: transformers cannot convert it: {reason}") from error


def _model(source: Path, dtype: torch.dtype, metadata: dict[str, Any]) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
        output_loading_info=True,
        trust_remote_code=False,
    )
    model: PreTrainedModel = loaded[0]
    missing: set[str] = loaded[1]["missing_keys"]  # Which transformers would fill with random numbers.
    if missing:
        raise ValueError(f"it lacks {len(missing)} weights, such as {min(missing)}")
    names = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    eos_ids = sorted({metadata[name] for name in names if name in metadata})
    if eos_ids and model.generation_config is not None:
        model.generation_config.eos_token_id = eos_ids
    return model


def _tokenizer(source: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, trust_remote_code=False
    )
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return tokenizer  # Only byte-level vocabularies name a rule by which text is cut.
    rule = metadata.get("tokenizer.ggml.pre")
    if rule in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif rule not in GGUF_PRE_TOKENIZER_SPLITS and rule not in _LIKE_GPT2:
        _LOG.warning("%s: unknown rule %r for cutting text (tokenizer.ggml.pre); using GPT-2's", source.name, rule)
    return tokenizer
