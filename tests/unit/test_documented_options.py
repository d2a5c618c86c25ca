"""Whatever command a page shows exists, with every option that it is shown with."""

import importlib
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from support.documented import NO_COMMANDS, NOT_RUN, PAGES, ROOT, blocks

from scissorhands.cli import main

SHELL = [block for block in blocks() if not block.language or block.language in {"bash", "sh"}]


def test_there_are_blocks_on_every_page_that_is_known_for_them():
    pages = {block.page for block in blocks()}
    assert {
        "README.md",
        "docs/deployment.md",
        "docs/quality.md",
        "docs/compression.md",
        "benchmarks/README.md",
    } <= pages
    assert any(block.language == "python" for block in blocks())


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_block_is_shell_that_can_be_read(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=30)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_and_option_exists(block, tmp_path, monkeypatch):
    checked = 0
    for command in block.commands:
        words = shlex.split(command.split(" < ")[0], comments=True)
        _provide(tmp_path, words)
        monkeypatch.chdir(tmp_path)
        checked += _check(words)
    assert checked, f"{block} has no command that is known; see NO_COMMANDS for what is none"


@pytest.mark.parametrize(
    "command",
    [
        "scissorhands generate x --nonsense",
        "scissorhands nonsense",
        "scissorhands generate x --budget much",
        "scissorhands eval perplexity --text text.txt --budgets 0.2",
        "python -m benchmarks.policy_cost --model m --nonsense",
    ],
)
def test_what_does_not_exist_is_found(command, tmp_path, monkeypatch):
    words = shlex.split(command)
    _provide(tmp_path, words)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(click.UsageError):
        _check(words)


def test_what_is_listed_is_there():
    text = "\n".join(page.read_text() for page in PAGES)
    for start in NO_COMMANDS:
        assert start in text, f"NO_COMMANDS lists {start!r}, which no page has"
    for start in ("make", "docker", "scissorhands eval", "python -m benchmarks"):
        assert start in NOT_RUN


def _provide(folder, words):
    """Make the files that a command reads; only its words are looked at."""
    for word in words:
        if re.fullmatch(r"[\w./-]+\.(txt|json|gguf)", word) and not word.startswith("/"):
            path = folder / word
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}", encoding="utf-8")


def _check(words):
    """Check one command; return whether it is one of those that pages may show."""
    match words:
        case ["scissorhands", *arguments]:
            _parse(main, "scissorhands", arguments)
        case ["python", "-m", module, *arguments]:
            loaded = importlib.import_module(module)
            _parse(loaded.main, module, arguments)
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), script
        case ["make", *targets]:
            subprocess.run(["make", "-n", "-C", str(ROOT), *targets], check=True, capture_output=True, timeout=60)
        case ["docker", "compose", *arguments]:
            files = [arguments[index + 1] for index, word in enumerate(arguments) if word == "-f"]
            assert files
            assert all((ROOT / file).is_file() for file in files), files
        case ["buf", "curl", *_, url]:
            service = url.split("/")[-2]
            assert service in {"scissorhands.v1.GenerationService", "scissorhands.v1.CacheManagerService"}
        case ["git" | "curl" | "redis-cli" | "prometheus" | "promtool", *_]:
            pass
        case [script, *_] if "/" in script and Path(ROOT / script).is_file():
            pass
        case _:
            return False
    return True


def _parse(command: click.Command, name, arguments):
    """Parse a command line as click does, down to its last subcommand, and run nothing."""
    context = command.make_context(name, list(arguments))
    if isinstance(command, click.Group):
        name, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert below is not None
        _parse(below, name, rest)
