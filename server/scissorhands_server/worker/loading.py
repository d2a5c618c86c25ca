"""Loading a causal language model from a folder, a hub id or a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants as hub
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from scissorhands.calibrated import Calibrated
from scissorhands.codec import Statistics
from scissorhands.eos import eos_ids
from scissorhands.errors import ConfigurationError, InvalidRequestError
from scissorhands.kinds import tell_kinds, token_kinds
from scissorhands.profile import Profile
from scissorhands.v1 import model_pb2
from scissorhands_server.worker.fingerprint import model_fingerprint, tokenizer_fingerprint
from scissorhands_server.worker.gguf_conversion import converted
from scissorhands_server.worker.refusal import ModelSizes, check_config, check_model

# Told what is being done, in words.
Progress = Callable[[str], None]

# What transformers, its tokenizers and safetensors raise on files that are missing, damaged or of another kind.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, SafetensorError)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be served.

    Args:
        model: The model, in evaluation mode, on its device.
        tokenizer: Its tokenizer, with its chat template if it has one.
        generation_config: Its generation configuration.
        eos_ids: Every id that ends an answer.
        info: What the protocol says about it.
        profile: What eviction costs in its KV heads; None if that was not measured.
        statistics: What was measured of its keys and values, for codecs that need it; None if nothing was.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig
    eos_ids: frozenset[int]
    info: model_pb2.ModelInfo
    profile: Profile | None = None
    statistics: Statistics | None = None


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_folder: Path,
    name: str = "",
    profile: Path | None = None,
    progress: Progress = lambda _: None,
) -> LoadedModel:
    """Load a model and check that it can be served.

    Args:
        model: A folder, a GGUF file, or an id on the Hugging Face hub. Weights must be safetensors or GGUF: nothing
            is unpickled, and no code that comes with a model is run.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on the CPU, else the checkpoint's own.
        device: A torch device, or ``auto``: the first CUDA device if there is one, else the CPU.
        cache_folder: Where converted GGUF files are kept.
        name: Name to serve it under; empty takes the folder's, the file's or the hub's.
        profile: What eviction costs in its KV heads, as ``scissorhands calibrate`` wrote it; None takes the file in the
            model's folder, if there is one.
        progress: Told what is being done.

    Raises:
        ConfigurationError: There is no such model, it cannot be read, or ``dtype`` or ``device`` is unknown.
        UnsupportedModelError: The model cannot be served rightly.
    """
    # Progress is told in words.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place = _device(device)
    folder = _resolve(model, cache_folder, progress)
    progress("reading the configuration")
    config: PretrainedConfig = _read(model, "configuration", AutoConfig.from_pretrained, folder)
    sizes = check_config(config)
    progress("reading the tokenizer")
    tokenizer: PreTrainedTokenizerBase = _read(model, "tokenizer", AutoTokenizer.from_pretrained, folder)
    progress("reading the weights")
    loaded = _load_weights(model, folder, _dtype(dtype, place))
    check_model(loaded)
    tell_kinds(loaded, token_kinds(tokenizer))
    progress("computing the fingerprint")
    info = _info(name or _name(model), loaded, tokenizer, sizes)
    calibrated = _calibrated(folder, profile, sizes)
    if place.type != "cpu":
        progress(f"moving the weights to {place}")
    loaded.to(place)  # type: ignore[arg-type]
    own = _generation_config(loaded)
    return LoadedModel(loaded, tokenizer, own, eos_ids(loaded, tokenizer), info, *calibrated)


def _calibrated(folder: str, path: Path | None, sizes: ModelSizes) -> Calibrated:
    """Return what was calibrated of a model, having made sure that it is of such a model."""
    try:
        found = Calibrated.find(folder, path)
        if found.profile:
            found.profile.check_size(sizes.layers, sizes.kv_heads)
        if found.statistics:
            sliding = sum(1 for window in sizes.layer_windows if window)
            found.statistics.check_size((sizes.layers - sliding) * sizes.kv_heads, sizes.head_dim)
    except InvalidRequestError as error:
        raise ConfigurationError(str(error)) from error
    return found


def _generation_config(model: PreTrainedModel) -> GenerationConfig:
    return model.generation_config if model.generation_config is not None else GenerationConfig()


def _resolve(model: str, cache_folder: Path, progress: Progress) -> str:
    """Return the folder or hub id to load from; a GGUF file is converted first."""
    if not model:
        raise ConfigurationError("model: must be a folder, a GGUF file or a hub id, not empty")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
            hint = f"; it holds {ggufs}: name the file itself" if ggufs else ""
            raise ConfigurationError(f"model {model!r}: the folder has no config.json{hint}")
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationError(f"model {model!r}: is a file but not a .gguf file; name its folder instead")
        return str(converted(path, cache_folder, progress))
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"model {model!r}: there is no such folder or file")
    return model


def _read(model: str, what: str, reader: Callable[..., Any], folder: str, **arguments: Any) -> Any:
    """Call one of transformers' ``from_pretrained`` and turn what it raises into our errors."""
    try:
        return reader(folder, trust_remote_code=False, **arguments)
    except _LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"model {model!r}: cannot read its {what}{_tried(folder)}: {reason}") from error


def _tried(folder: str) -> str:
    if Path(folder).is_dir():
        return ""
    offline = ", offline because HF_HUB_OFFLINE is set" if hub.HF_HUB_OFFLINE else ""
    return f" (tried as a folder, as a file and as a hub id{offline})"


def _load_weights(model: str, folder: str, dtype: torch.dtype | str) -> PreTrainedModel:
    loaded, report = _read(
        model,
        "weights",
        AutoModelForCausalLM.from_pretrained,
        folder,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
    )
    # transformers fills what it does not find with random numbers, and says so in a log line.
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(str(key) for key in report[problem])[:3])
            raise ConfigurationError(
                f"model {model!r}: its weights do not fit its configuration: "
                f"{len(report[problem])} {problem.replace('_', ' ')}, such as {names}"
            )
    result: PreTrainedModel = loaded  # In evaluation mode, as from_pretrained leaves it.
    result.requires_grad_(requires_grad=False)
    return result


def _info(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: ModelSizes
) -> model_pb2.ModelInfo:
    return model_pb2.ModelInfo(
        name=name,
        fingerprint=model_fingerprint(model),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=sizes.layers,
        query_heads=sizes.query_heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_positions=sizes.max_positions,
        vocabulary=sizes.vocabulary,
        element_bytes=model.dtype.itemsize,
        layer_windows=sizes.layer_windows,
    )


def _name(model: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else model


def _dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype {dtype!r}: must be one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device {device!r}: must be auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {device!r}: torch finds no CUDA device here")
    return place
