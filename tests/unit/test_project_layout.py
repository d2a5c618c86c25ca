"""What the repository promises about its own layout and packaging."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scissorhands import __version__

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 400
GENERATED = "scissorhands/v1/"
SOURCES = re.compile(r"(\.(py|sh|proto|yaml|yml|toml|Dockerfile)|(^|/)Makefile|^\.ci/run)$")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = folder.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("folder", ["server", "client", "proto", "docker"])
def test_folders_that_are_no_packages(folder):
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_wheel_brings_only_our_three_import_names(wheel_names):
    tops = {PurePosixPath(name).parts[0] for name in wheel_names}
    assert tops == {
        "scissorhands",
        "scissorhands_server",
        "scissorhands_client",
        f"scissorhands-{__version__}.dist-info",
    }


def test_the_wheel_brings_the_generated_code_and_its_stubs(wheel_names):
    for name in ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py", "cache_manager_pb2.py"):
        assert f"{GENERATED}{name}" in wheel_names


def test_the_wheel_brings_the_parts_of_the_explained_page(wheel_names):
    for name in ("page.html", "style.css", "state.js", "pictures.js", "page.js"):
        assert f"scissorhands/explain/assets/{name}" in wheel_names


def test_every_dependency_has_a_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for group in project["optional-dependencies"].values() for line in group)]
    needed = [Requirement(line) for line in lines]
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    versions = {canonicalize_name(each.name): next(iter(each.specifier)).version for each in pinned}
    for requirement in needed:
        if requirement.name != "scissorhands":
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_no_file_is_too_long():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=30,
    )
    names = [name for name in listed.stdout.decode().split("\0") if SOURCES.search(name)]
    assert "scissorhands/cli.py" in names
    lengths = {
        name: len((ROOT / name).read_text(encoding="utf-8").splitlines())
        for name in names
        if not name.startswith(GENERATED) and (ROOT / name).exists()
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_console_script_runs():
    command = Path(sys.executable).with_name("scissorhands")
    shown = subprocess.run([command, "--version"], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout == f"scissorhands, version {__version__}\n"


def test_every_subcommand_loads():
    command = Path(sys.executable).with_name("scissorhands")
    shown = subprocess.run([command, "--help"], check=True, capture_output=True, text=True, timeout=120)
    for name in ("chat", "doctor", "eval", "explain", "generate", "manager", "sessions", "up", "worker"):
        assert re.search(rf"^  {name} ", shown.stdout, re.MULTILINE)
    assert "not installed" not in shown.stdout
