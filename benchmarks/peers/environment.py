"""The virtual environment that kvpress runs in, made once, and again when the pins change."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.peers.program import PeerError

FOLDER = Path(__file__).resolve().parent
VENV = FOLDER / ".venv"
REQUIREMENTS = FOLDER / "requirements.txt"
KVPRESS = "kvpress==0.5.5"

_INSTALL_SECONDS = 3600
_PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile")


def prepare(console: Console) -> Path:
    """Return the environment's interpreter; the environment is made if it is missing or of other pins.

    Raises:
        PeerError: It cannot be made.
    """
    python, stamp = VENV / "bin" / "python", VENV / "pins.sha256"
    wanted = hashlib.sha256(f"{KVPRESS}\n{REQUIREMENTS.read_text(encoding='utf-8')}".encode()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        console.print(f"making {VENV} with {KVPRESS}, once", highlight=False)
        shutil.rmtree(VENV, ignore_errors=True)
        _call(sys.executable, "-m", "venv", str(VENV))
        _call(str(python), *_PIP, "-r", str(REQUIREMENTS))
        _call(str(python), *_PIP, "--no-deps", KVPRESS)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def versions() -> dict[str, str]:
    """Return the versions that decide the figures, by the pins."""
    lines = [KVPRESS, *REQUIREMENTS.read_text(encoding="utf-8").splitlines()]
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {name: pins[name] for name in ("kvpress", "torch", "transformers", "optimum-quanto")}


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, timeout=_INSTALL_SECONDS)  # noqa: S603 - only what stands above
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"cannot make {VENV}: {error}") from error
