"""The manager's own set of dependencies: without torch, and enough to serve with the embedded store."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 30


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the folder of programs of a fresh virtual environment that holds the manager alone."""
    folder = tmp_path_factory.mktemp("manager") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, f"{ROOT}[manager]"], cwd=folder, check=True, timeout=280)
    return folder / "bin"


@pytest.fixture
def clean():
    """Return the environment variables without what would lead back to this checkout or set the manager up."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("SCISSORHANDS_")
    }


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until_it_serves(environment, address, process):
    check = [environment / "python", "-m", "scissorhands_server.healthcheck", address]
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "the manager ended by itself"
        checked = subprocess.run(check, cwd="/", check=False, capture_output=True, text=True, timeout=30)
        if checked.returncode == 0:
            return checked.stdout
        assert time.monotonic() < end, checked.stderr
        time.sleep(0.2)


def test_nothing_of_torch_is_installed(environment):
    listing = [environment / "python", "-m", "pip", "list", "--format=json"]
    listed = subprocess.run(listing, check=True, capture_output=True, timeout=60)
    names = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert {"scissorhands", "numpy", "redis"} <= names
    assert not names & {"torch", "transformers", "accelerate", "safetensors", "tokenizers", "gguf", "triton"}
    assert not {name for name in names if name.startswith("nvidia")}


def test_it_serves_with_the_embedded_store_and_leaves_nothing_behind(environment, clean, tmp_path):
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    command = [environment / "scissorhands", "manager", "--port", str(port), "--metrics-port", str(metrics_port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=clean, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        assert wait_until_it_serves(environment, address, process) == "SERVING\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("valkey" in child.name() for child in children)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=STOP_SECONDS) == 0
        _, alive = psutil.wait_procs(children, timeout=STOP_SECONDS)
        assert alive == []
    except AssertionError as error:
        error.add_note((tmp_path / "log").read_text())
        raise
    finally:
        process.kill()
        process.wait()
