"""Fetch real texts for `scissorhands eval` into .texts/, from Debian packages. What is there already is left alone.

Nothing is installed: the packages are downloaded and unpacked into a temporary folder. Jane Austen's novels and the
Jargon File are in the public domain; the Debian Handbook is under GPL-2+ or CC-BY-SA-3.0.
"""

import gzip
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import click

FOLDER = Path(__file__).resolve().parent.parent / ".texts"
DOWNLOAD_SECONDS = 600
UNPACK_SECONDS = 120

NOVELS = (
    "emma",
    "mansfield-park",
    "northanger-abbey",
    "persuasion",
    "pride-and-prejudice",
    "sense-and-sensibility",
)
_R_STRINGS, _R_STRING = 16, 9
_BLOCKS = frozenset({"div", "p", "li", "dt", "dd", "h1", "h2", "h3", "h4", "pre", "table", "tr", "br"})
_SILENT = frozenset({"head", "script", "style"})


def main() -> None:
    """Fetch what is missing, telling what is done."""
    FOLDER.mkdir(exist_ok=True)
    for package, (names, read) in SOURCES.items():
        missing = [name for name in names if not (FOLDER / f"{name}.txt").is_file()]
        if missing:
            click.echo(f"fetching {package}")
            _fetch(package, names, read)
    click.echo(f"texts are ready: {FOLDER.name}/")


def _fetch(package: str, names: tuple[str, ...], read: Callable[[Path], list[str]]) -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".download-") as name:
        folder = Path(name)
        _run(["apt-get", "--quiet", "--quiet", "download", package], folder, DOWNLOAD_SECONDS)
        (archive,) = folder.glob("*.deb")
        _run(["dpkg-deb", "--extract", archive.name, "unpacked"], folder, UNPACK_SECONDS)
        for text_name, text in zip(names, read(folder / "unpacked"), strict=True):
            # Written beside its place, so that a file there is always whole.
            (folder / "text").write_text(text, encoding="utf-8")
            (folder / "text").rename(FOLDER / f"{text_name}.txt")


def _run(command: list[str], folder: Path, seconds: int) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, timeout=seconds)  # noqa: S603 - all of it is written above
    except FileNotFoundError as error:
        raise click.ClickException(f"{command[0]} is missing: the texts come from Debian packages") from error
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"{' '.join(command)} failed; try: apt-get update") from error
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"{' '.join(command)} took more than {seconds} s") from error


def read_novels(root: Path) -> list[str]:
    """Return the six novels of r-cran-janeaustenr, in the order of their titles."""
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    novels = []
    while data:
        (size,) = struct.unpack_from(">I", data)
        inflate = zlib.decompressobj()
        serialized = inflate.decompress(data[4:], size)
        novels.append("\n".join(r_strings(serialized)) + "\n")
        data = inflate.unused_data
    return novels


def r_strings(data: bytes) -> Iterator[str]:
    """Yield the strings of a serialized R character vector (``XDR``, version 3).

    Raises:
        click.ClickException: The data are something else.
    """
    (encoding_length,) = struct.unpack_from(">I", data, 14)
    kind, count = struct.unpack_from(">II", data, 18 + encoding_length)
    if not data.startswith(b"X\n\x00\x00\x00\x03") or kind & 0xFF != _R_STRINGS:
        raise click.ClickException("the novels are not stored as they were: not an R character vector")
    place = 26 + encoding_length
    for _ in range(count):
        kind, length = struct.unpack_from(">Ii", data, place)
        if kind & 0xFF != _R_STRING or length < 0:
            raise click.ClickException("the novels are not stored as they were: a line is not a string")
        yield data[place + 8 : place + 8 + length].decode()
        place += 8 + length


def read_handbook(root: Path) -> list[str]:
    """Return the English Debian Handbook, its pages in the order of its contents."""
    folder = root / "usr/share/doc/debian-handbook/html/en-US"
    links = re.findall(r'href="([\w.-]+\.html)', (folder / "index.html").read_text(encoding="utf-8"))
    pages = [folder / name for name in dict.fromkeys(links) if name != "index.html"]
    return ["\n\n".join(html_text(page.read_text(encoding="utf-8")) for page in pages if page.is_file()) + "\n"]


def read_jargon(root: Path) -> list[str]:
    """Return the Jargon File."""
    return [gzip.decompress((root / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode(errors="replace")]


class _Text(HTMLParser):
    """Gathers the text of a page, block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [""]
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block."""
        del attrs
        self._silent += tag in _SILENT
        if tag in _BLOCKS:
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        """End a block."""
        self._silent -= tag in _SILENT
        if tag in _BLOCKS:
            self.blocks.append("")

    def handle_data(self, data: str) -> None:
        """Add to the block."""
        if not self._silent:
            self.blocks[-1] += data


def html_text(page: str) -> str:
    """Return the text of a page: its blocks apart, other white space as one space."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return "\n\n".join(text for block in parser.blocks if (text := " ".join(block.split())))


SOURCES: dict[str, tuple[tuple[str, ...], Callable[[Path], list[str]]]] = {
    "r-cran-janeaustenr": (NOVELS, read_novels),
    "debian-handbook": (("debian-handbook",), read_handbook),
    "jargon-text": (("jargon-file",), read_jargon),
}


if __name__ == "__main__":
    main()
