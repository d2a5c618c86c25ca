import subprocess
import sys

import pytest

FORBIDDEN = ("torch", "redis", "valkey", "transformers", "scissorhands_server", "pydantic", "numpy")


@pytest.mark.parametrize(
    "module",
    [
        "scissorhands_client",
        "scissorhands_client.commands.generate",
        "scissorhands_client.commands.chat",
        "scissorhands_client.commands.sessions",
    ],
)
def test_the_client_is_light(module):
    code = f"import sys, {module}; print(*(name for name in {FORBIDDEN} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["doctor", "--help"], ["worker", "--help"]])
def test_help_waits_for_no_heavy_module(arguments):
    code = (
        "import sys; from scissorhands.cli import main; main(standalone_mode=False); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
