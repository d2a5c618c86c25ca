"""docs/compatibility.md: breaks of the contract are found, and the versions that it names are the code's."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scissorhands import prefix, profile, segment, suspended
from scissorhands.codec import codec_version

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
BASELINE = ROOT / "proto" / "released.binpb"


def breaks(folder):
    """Return what of the released contract a folder's contract breaks; empty if nothing."""
    command = [str(BUF), "breaking", str(folder), "--against", str(BASELINE)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode in (0, 100), finished.stderr
    return finished.stdout


@pytest.fixture
def contract(tmp_path):
    """Return a copy of the contract that may be changed."""
    return shutil.copytree(ROOT / "proto", tmp_path / "proto")


def change(contract, file, before, after):
    path = contract / "scissorhands" / "v1" / file
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


def test_the_contract_breaks_nothing_that_was_released(contract):
    assert breaks(contract) == ""


def test_a_field_and_a_method_may_be_added(contract):
    change(contract, "plan.proto", "message PlanResult {", "message PlanResult {\n  bool added = 1000;")
    change(
        contract,
        "cache_manager.proto",
        "service CacheManagerService {",
        "service CacheManagerService {\n  rpc Added(OpenSessionRequest) returns (OpenSessionResponse);",
    )
    assert breaks(contract) == ""


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("generation.proto", "uint32 plans_manager = 7;", ""),
        ("generation.proto", "uint32 plans_manager = 7;", "uint32 plans_manager = 99;"),
        ("generation.proto", "uint32 plans_manager = 7;", "string plans_manager = 7;"),
        ("cache_manager.proto", "rpc CloseSession(CloseSessionRequest) returns (CloseSessionResponse);", ""),
    ],
)
def test_a_break_is_found(contract, file, before, after):
    change(contract, file, before, after)
    assert f"{file}:" in breaks(contract)


def test_the_page_names_the_versions_of_the_formats():
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| [\w ]+ \| (?:`(SC\w\w)`|part of each identity) .*? \| (\d+) \|", page, re.MULTILINE))
    versions = {module.MAGIC.decode(): str(module.VERSION) for module in (suspended, prefix, segment)}
    assert found == {**versions, "": codec_version("int4")}
    assert f"`format` {profile._FORMAT} " in page
