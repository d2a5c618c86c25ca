"""Where `make model` puts the real model, SmolLM2-135M-Instruct."""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / ".models"
# Converted: what the worker and transformers load.
REAL_MODEL = _FOLDER / "smollm2-135m-instruct"
# As it was downloaded.
REAL_GGUF = _FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"


def require(path: Path) -> Path:
    """Return the path; a model that is not there fails the test, and is never a reason to skip it."""
    assert path.exists(), f"{path} is missing: run `make model`"
    return path
