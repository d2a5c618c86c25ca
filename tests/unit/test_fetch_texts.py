"""What the script makes of the packages' formats."""

import importlib.util
import struct
import zlib
from pathlib import Path

import click
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_texts.py"
HEADER = b"X\n" + struct.pack(">III", 3, 0x40200, 0x30500) + struct.pack(">I", 5) + b"UTF-8"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_texts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serialized(*lines, kind=9):
    strings = b"".join(struct.pack(">HHI", 4, kind, len(line.encode())) + line.encode() for line in lines)
    return HEADER + struct.pack(">II", 16, len(lines)) + strings


def test_novels_are_read_from_r_data(script, tmp_path):
    folder = tmp_path / "usr/lib/R/site-library/janeaustenr/data"
    folder.mkdir(parents=True)
    novels = [serialized("EMMA", "", "é"), serialized("PERSUASION")]
    blobs = [struct.pack(">I", len(novel)) + zlib.compress(novel) for novel in novels]
    (folder / "Rdata.rdb").write_bytes(b"".join(blobs))
    assert script.read_novels(tmp_path) == ["EMMA\n\né\n", "PERSUASION\n"]


@pytest.mark.parametrize("data", [serialized("EMMA", kind=10), serialized("EMMA").replace(b"X\n", b"A\n")])
def test_other_r_data_are_refused(script, data):
    with pytest.raises(click.ClickException, match="not stored as they were"):
        list(script.r_strings(data))


def test_the_handbook_is_read_in_the_order_of_its_contents(script, tmp_path):
    folder = tmp_path / "usr/share/doc/debian-handbook/html/en-US"
    folder.mkdir(parents=True)
    links = '<a href="index.html"/><a href="two.html#x"/><a href="one.html"/><a href="two.html"/><a href="gone.html"/>'
    (folder / "index.html").write_text(links)
    (folder / "one.html").write_text("<head><title>no</title></head><p>one\n <b>bold</b>&amp;</p><script>no</script>")
    (folder / "two.html").write_text("<div>two<p>three</p></div>")
    assert script.read_handbook(tmp_path) == ["two\n\nthree\n\none bold&\n"]


def test_what_is_there_already_is_not_fetched(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "FOLDER", tmp_path / ".texts")
    monkeypatch.setenv("PATH", str(tmp_path))  # No apt-get within reach.
    (tmp_path / ".texts").mkdir()
    for names, _ in script.SOURCES.values():
        for name in names:
            (tmp_path / ".texts" / f"{name}.txt").write_text("there")
    script.main()
    assert capsys.readouterr().out == "texts are ready: .texts/\n"
    (tmp_path / ".texts" / "emma.txt").unlink()
    with pytest.raises(click.ClickException, match="apt-get is missing"):
        script.main()
    assert not list((tmp_path / ".texts").glob(".*"))
