"""``scissorhands explain`` on a tiny model: the page that it writes, and what it refuses."""

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support.tiny_worker import POSITIONS, tiny_folder

from scissorhands.explain.command import explain

TEXT = "It is a truth universally acknowledged. " * 4


def invoke(out, *arguments):
    options = ["--model", tiny_folder(), "--max-new-tokens", 24, "--out", out, *arguments]
    return CliRunner().invoke(explain, [str(part) for part in options])


def data_of(out):
    return json.loads(re.search(r'id="data">(.*?)</script>', out.read_text(encoding="utf-8"), re.DOTALL).group(1))


def test_it_writes_a_page(tmp_path):
    out, file = tmp_path / "page.html", tmp_path / "prompt.txt"
    file.write_text(TEXT + "</script>\n\n", encoding="utf-8")
    result = invoke(out, "--prompt-file", file, "--policy", "h2o", "--budget", 0.4)
    assert result.exit_code == 0, result.output
    data = data_of(out)
    assert "".join(data["texts"][: data["prompt"]]) == TEXT + "</script>"
    assert data["cuts"]["step"]
    assert {figure["name"]: figure["value"] for figure in data["figures"]}["budget"] == "40%"
    assert str(out) in result.stderr


def test_a_prompt_of_the_command_line(tmp_path):
    out = tmp_path / "page.html"
    assert invoke(out, "--prompt", TEXT).exit_code == 0
    assert "".join(data_of(out)["texts"]).startswith(TEXT)


@pytest.mark.parametrize(
    ("arguments", "option", "reason"),
    [
        ([], "", "give either --prompt or --prompt-file"),
        (["--prompt", "a", "--prompt-file", __file__], "", "give either --prompt or --prompt-file"),
        (["--prompt", ""], "--prompt", "must not be empty"),
        (["--prompt", TEXT * 4], "--prompt", f"more than the model's {POSITIONS} positions"),
        (["--prompt", TEXT, "--policy", "lru"], "--policy", "allowed: scissorhands, scissorhands:uniform"),
        (["--prompt", TEXT, "--budget", "1.5"], "--budget", "above 0 and at most 1"),
        (["--prompt", TEXT, "--device", "nowhere"], "--device", "cannot be used"),
        (["--prompt", TEXT, "--model", "/nowhere"], "--model", "cannot load"),
    ],
)
def test_what_it_refuses(tmp_path, arguments, option, reason):
    result = invoke(tmp_path / "page.html", *arguments)
    assert result.exit_code == 2
    message = " ".join(result.output.replace("│", " ").split())
    assert option in message
    assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_file_that_is_no_text(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"abc\xff")
    result = invoke(tmp_path / "page.html", "--prompt-file", file)
    assert result.exit_code == 2
    assert "is not UTF-8 text (byte 3)" in result.output


def test_an_empty_prompt_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("\n\n", encoding="utf-8")
    result = invoke(tmp_path / "page.html", "--prompt-file", file)
    assert result.exit_code == 2
    assert "--prompt-file" in result.output
    assert "must not be empty" in result.output


def test_a_folder_that_is_not_there(tmp_path):
    result = invoke(tmp_path / "none" / "page.html", "--prompt", TEXT)
    assert result.exit_code == 2
    assert "there is no folder" in result.output


def test_help_and_wrong_options_need_no_torch():
    code = (
        "import sys; from click.testing import CliRunner; from scissorhands.explain.command import explain; "
        "found = CliRunner().invoke(explain, ['--help']); assert '--prompt-file' in found.output; "
        "wrong = CliRunner().invoke(explain, '--model m --prompt p --policy lru --out page.html'.split()); "
        "assert wrong.exit_code == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
