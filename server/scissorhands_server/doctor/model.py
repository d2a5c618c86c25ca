"""Whether the worker will find a model, and room for it. Torch is not needed to tell."""

import importlib
import json
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from scissorhands_server.doctor.finding import Finding

_GGUF_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# A folder's own number type, in bytes of one element; on a CPU the worker computes in four.
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_CPU_ELEMENT_BYTES = 4
# A 4-bit GGUF file has about half a byte an element; its conversion has at most four.
_GGUF_GROWTH = 8
# What the interpreter and torch take before any model is there, in bytes.
_BASE_MEMORY = 1 << 30
_SMALLEST_FREE_DISK = 1 << 30
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Needs:
    """What serving a model takes.

    Args:
        memory: Bytes of its weights in memory, on the CPU.
        disk: Bytes that are written before it is served.
    """

    memory: int = 0
    disk: int = 0


def check_model(model: str) -> tuple[list[Finding], Needs]:
    """Look at a folder, a GGUF file or a hub id, and tell what serving it takes."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _check_folder(path)
    if path.is_file():
        return _check_gguf(path)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        return [Finding.failed("model", f"there is no {model}", "give a folder, a GGUF file or a hub id")], Needs()
    return [_check_hub(model)], Needs()


def check_memory(needs: Needs) -> Finding:
    """Compare the free memory with what a worker on the CPU takes."""
    needed = _BASE_MEMORY + needs.memory
    free = _free_memory()
    if free is None:
        return Finding.warning("memory", "cannot be told on this system", f"have {decimal(needed)} free")
    found = f"{decimal(free)} free, about {decimal(needed)} needed on the CPU"
    if free >= needed:
        return Finding.ok("memory", found)
    return Finding.failed("memory", found, "free some, take a smaller model, or serve with --dtype bfloat16")


def check_disk(needs: Needs, folder: Path) -> Finding:
    """Compare the free disk under ``folder``, where converted models go, with what a conversion takes."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    needed = max(_SMALLEST_FREE_DISK, needs.disk)
    found = f"{decimal(free)} free at {folder}, {decimal(needed)} needed"
    if free >= needed:
        return Finding.ok("disk", found)
    return Finding.failed("disk", found, "free some, or serve with --cache-folder on another disk")


def _check_folder(folder: Path) -> tuple[list[Finding], Needs]:
    try:
        config = _read_object(folder / "config.json")
    except FileNotFoundError:
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        fix = f"name the file itself: {folder / ggufs[0]}" if ggufs else "name a folder that save_pretrained wrote"
        return [Finding.failed("model", f"{folder} has no config.json", fix)], Needs()
    except (OSError, ValueError) as error:
        return [Finding.failed("model", f"{folder / 'config.json'}: {error}", "fetch the model again")], Needs()
    try:
        weights = _weight_files(folder)
    except (OSError, ValueError, KeyError) as error:
        return [
            Finding.failed("model", f"its index of weights cannot be read: {error}", "fetch the model again")
        ], Needs()
    if not weights:
        others = any(folder.glob("*.bin"))
        found = "it has weights, but as pickles, which are not loaded" if others else "it has no *.safetensors"
        return [Finding.failed("model", f"{folder}: {found}", "fetch its safetensors weights")], Needs()
    findings = [_check_weights(weights), _check_tokenizer(folder)]
    element = _ELEMENT_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), _CPU_ELEMENT_BYTES)
    size = sum(file.stat().st_size for file in weights if file.is_file())
    return findings, Needs(memory=size * _CPU_ELEMENT_BYTES // element)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError("it has no weight_map")
        return [folder / str(name) for name in sorted(set(names.values()))]
    return sorted(folder.glob("*.safetensors"))


def _check_weights(files: list[Path]) -> Finding:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        return Finding.failed("model", f"weights are missing: {', '.join(missing)}", "fetch the model again")
    pointers = [file.name for file in files if _begins_with(file, _LFS_POINTER)]
    if pointers:
        return Finding.failed("model", f"only a Git LFS pointer: {', '.join(pointers)}", "run 'git lfs pull' there")
    size = sum(file.stat().st_size for file in files)
    return Finding.ok("model", f"{files[0].parent}: {decimal(size)} in {len(files)} files of weights")


def _check_tokenizer(folder: Path) -> Finding:
    found = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if found:
        return Finding.ok("tokenizer", found[0])
    return Finding.failed("tokenizer", f"{folder} has none of {', '.join(_TOKENIZERS)}", "fetch the tokenizer's files")


def _check_gguf(file: Path) -> tuple[list[Finding], Needs]:
    if not _begins_with(file, _GGUF_MAGIC):
        return [Finding.failed("model", f"{file} is no GGUF file", "give a folder, a GGUF file or a hub id")], Needs()
    size = file.stat().st_size
    found = f"{file}: {decimal(size)}, converted once before it is served"
    return [Finding.ok("model", found)], Needs(memory=size * _GGUF_GROWTH, disk=size * _GGUF_GROWTH)


def _check_hub(model: str) -> Finding:
    # Looked for, because it comes with transformers, and a machine without it must be told so instead of failing here.
    if find_spec("huggingface_hub") is None:
        return Finding.failed("model", f"{model} is no path, and huggingface_hub is missing", "install it")
    # Loaded by name for the same reason.
    hub = importlib.import_module("huggingface_hub")
    try:
        cached = hub.try_to_load_from_cache(model, "config.json")
    except ValueError as error:
        return Finding.failed("model", f"{model} is neither a path nor a hub id: {error}", "give one of them")
    if isinstance(cached, str):
        return Finding.ok("model", f"{model} is in the hub's cache: {Path(cached).parent}")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding.failed(
            "model", f"{model} is not in the hub's cache, and HF_HUB_OFFLINE is set", "unset it, or fetch the model"
        )
    return Finding.warning("model", f"{model} is not in the hub's cache", "the worker will download it at its start")


def _read_object(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - Of the file's content, like malformed JSON.
    return value


def _begins_with(file: Path, magic: bytes) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def _free_memory() -> int | None:
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
