"""Draw docs/explain.png, the picture of `scissorhands explain` in the README, with the real model and Chromium.

It needs the model (`make model`) and Debian's package chromium.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "smollm2-135m-instruct"
TEXT = ROOT / "examples" / "texts" / "sense-and-sensibility.txt"
PICTURE = ROOT / "docs" / "explain.png"
# So much that the whole prompt is seen.
LINES = 23
NEW_TOKENS = 64
BUDGET = 0.25
# What is seen: the end, and the card of one token.
VIEW = "token=157"
WIDTH, HEIGHT = 1240, 1040
# The picture stands in the repository.
MOST_BYTES = 300_000
EXPLAIN_SECONDS, DRAW_SECONDS = 600, 60


def main() -> None:
    """Run the prompt, and draw its page."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise click.ClickException("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompt.txt").write_text("".join(TEXT.read_text().splitlines(keepends=True)[:LINES]))
        explain = [sys.executable, "-m", "scissorhands", "explain", "--model", str(MODEL), "--budget", str(BUDGET)]
        explain += ["--prompt-file", str(folder / "prompt.txt"), "--max-new-tokens", str(NEW_TOKENS)]
        _run([*explain, "--out", str(folder / "page.html")], EXPLAIN_SECONDS)
        draw = [chromium, "--headless=new", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
        draw += [f"--user-data-dir={folder / 'chromium'}", f"--window-size={WIDTH},{HEIGHT}"]
        if os.geteuid() == 0:
            draw += ["--no-sandbox"]  # It does not work for root, and the page is our own.
        draw += ["--virtual-time-budget=3000", f"--screenshot={folder / 'page.png'}"]
        _run([*draw, f"{(folder / 'page.html').as_uri()}#{VIEW}"], DRAW_SECONDS)
        size = (folder / "page.png").stat().st_size
        if size > MOST_BYTES:
            raise click.ClickException(f"the picture takes {size} bytes, more than {MOST_BYTES}")
        shutil.copyfile(folder / "page.png", PICTURE)
    click.echo(f"{PICTURE.relative_to(ROOT)}: {size} bytes")


def _run(command: list[str], seconds: int) -> None:
    try:
        subprocess.run(command, check=True, timeout=seconds, stderr=subprocess.PIPE, text=True)  # noqa: S603 - ours
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"{Path(command[0]).name} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"{Path(command[0]).name} took more than {seconds} s") from error


if __name__ == "__main__":
    main()
