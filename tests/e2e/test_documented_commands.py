"""Every block of commands and of Python in the README and the documentation, run as it stands.

The model's name stands for a tiny model, the addresses for those of a system on free ports. Blocks that install things,
measure for long or run until they are stopped are not run here: ``support.documented`` lists them with the reasons, and
``tests/unit/test_documented_options.py`` checks their options.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documented import ROOT, blocks
from support.system import running_system
from support.tiny_folder import make_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from scissorhands.cli import main

MODEL = ".models/smollm2-135m-instruct"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
RUN = [block for block in blocks() if block.language != "python" and block.reason_not_run is None]
PYTHON = [block for block in blocks() if block.language == "python"]
# What `scissorhands chat` is told.
TYPED = "Hello.\n/exit\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder like the root of the repository, with a tiny model under the name of the real one."""
    folder = tmp_path_factory.mktemp("clone")
    tiny = make_folder(folder, positions=16384, chat_template=CHAT_TEMPLATE, head_dim=64)
    (folder / ".models").mkdir()
    (tiny / "model").rename(folder / MODEL)
    for name in ("examples", "docs", "scripts", "docker"):
        (folder / name).symlink_to(ROOT / name)
    # The real model comes with a profile; this is how one is made for another.
    words = ["calibrate", "--model", MODEL, "--text", "text.txt", "--sequences", "2", "--length", "128"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(words, standalone_mode=False)
    return folder


@pytest.fixture(scope="module")
def system(folder):
    with running_system(folder, folder / MODEL) as running:
        yield running


def here(text, system):
    """Return a block's text with the addresses of the system that runs."""
    text = text.replace("127.0.0.1:50051", system.address("worker"))
    return text.replace("127.0.0.1:50052", system.address("manager"))


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_of_commands_runs(block, folder, system):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SCISSORHANDS_CLIENT_SERVER": system.address("worker"),
        "SCISSORHANDS_CLIENT_MANAGER": system.address("manager"),
    }
    finished = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here(block.text, system)],
        cwd=folder,
        env=environment,
        input=TYPED,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout + finished.stderr
    for written in re.findall(r"--out (\S+)", block.text):
        assert (folder / written).stat().st_size > 0


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_the_python_of_a_page_runs(page, folder, system, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    names = {"model": model, "tokenizer": tokenizer, "prompts": ["Once upon a time", "It is a truth"]}
    for block in PYTHON:
        if block.page == page:
            exec(
                compile(here(block.text, system), str(block), "exec"), names
            )  # The page's own code, from this repository.
    assert capsys.readouterr().out
