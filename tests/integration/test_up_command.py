"""``scissorhands up`` as a process: a real store, and servers with nothing but health for manager and worker."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis
from click.testing import CliRunner
from support.liveness import alive
from support.processes import RedisProcess, wait_for

from scissorhands_server.up.command import up

# Longer than anything here takes, in seconds.
PATIENCE = 60
TESTS = Path(__file__).parent.parent
FREE = ["--port", "0", "--metrics-port", "0", "--manager-port", "0", "--manager-metrics-port", "0"]


class Up:
    """A running ``up`` and what it has said."""

    def __init__(self, folder, *options):
        self.log = folder / "log"
        self.log.touch()
        self.told = folder / "told"
        self.state_file = folder / "state.json"
        arguments = [str(self.log), "--model", "tiny", "--state-file", str(self.state_file), *FREE, *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SCISSORHANDS_")}
        # What a killed process leaves; not under pytest's folder, whose paths are too long for a Unix socket.
        self._temporary = TemporaryDirectory(prefix="up-")
        environment["TMPDIR"] = self._temporary.name
        with self.told.open("wb") as told:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.stand_in_up", *arguments],
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                cwd=TESTS,
                env=environment,
                start_new_session=True,
            )
        self.seen = set()

    def state(self):
        """Return the state once everything is ready."""

        def written():
            assert self.process.poll() is None, self.told.read_text()
            return self.state_file.exists()

        wait_for(written, "up to be ready", PATIENCE)
        state = json.loads(self.state_file.read_text())
        self.seen |= {part["pid"] for part in state.values() if part["pid"]}
        return state

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        return self.process.returncode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdout.close()
        wait_for(lambda: not any(alive(pid) for pid in self.seen), "all processes to be gone", PATIENCE)
        self._temporary.cleanup()


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*options):
        started.append(Up(tmp_path, *options))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def listens(address):
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_everything_starts_and_stops_in_order(start, number):
    running = start()
    state = running.state()
    assert state["up"]["pid"] == running.process.pid
    assert redis.Redis.from_url(state["store"]["url"]).ping()
    addresses = [
        state["worker"]["address"],
        state["manager"]["address"],
        state["store"]["url"].removeprefix("redis://"),
    ]
    assert all(map(listens, addresses))
    assert running.end(number) == 0
    assert running.log.read_text().splitlines() == [
        "manager started",
        "manager ready",
        "worker started",
        "worker ready",
        "worker stopped",
        "manager stopped",
    ]
    assert not any(map(listens, addresses))
    assert not running.state_file.exists()
    block = running.process.stdout.read()
    assert "\nready\n" in block
    assert all(address in block for address in addresses)
    told = running.told.read_text()
    assert "worker  | worker says hello" in told
    assert "Traceback" not in told


def test_killing_up_leaves_nothing(start):
    running = start()
    state = running.state()
    running.process.kill()
    running.process.wait(PATIENCE)
    wait_for(lambda: not any(alive(pid) for pid in running.seen), "all processes to be gone", PATIENCE)
    # A killed process can be waiting to be reaped while the last of its threads still holds its port.
    for name in ("worker", "manager"):
        wait_for(lambda name=name: not listens(state[name]["address"]), f"the {name}'s port to be free", PATIENCE)


@pytest.mark.parametrize("name", ["manager", "worker", "store"])
def test_what_is_killed_comes_back_at_its_address(start, name):
    running = start()
    before = running.state()
    os.kill(before[name]["pid"], signal.SIGKILL)
    wait_for(lambda: running.state()[name]["pid"] != before[name]["pid"], f"another {name}", PATIENCE)
    after = running.state()
    for part in before:
        expected = {**before[part], "pid": after[part]["pid"]} if part == name else before[part]
        assert after[part] == expected
    wait_for(lambda: redis_answers(after["store"]["url"]), "the store", PATIENCE)
    assert listens(after["worker"]["address"])
    assert running.end(signal.SIGTERM) == 0
    assert re.search(rf"{name} .*(was killed by SIGKILL|exit status -9)", running.told.read_text())


def redis_answers(url):
    try:
        return redis.Redis.from_url(url).ping()
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("name", ["manager", "store"])
def test_without_restart_one_end_ends_everything(start, name):
    running = start("--no-restart")
    state = running.state()
    os.kill(state[name]["pid"], signal.SIGKILL)
    assert running.process.wait(PATIENCE) == 1
    assert running.log.read_text().splitlines()[-1] == ("worker stopped" if name == "manager" else "manager stopped")
    assert f"Error: {name} " in running.told.read_text()


def test_a_second_signal_ends_the_grace(start):
    running = start("--stop-timeout", "3600")
    state = running.state()
    os.kill(state["worker"]["pid"], signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping" in running.told.read_text(), "the first signal", PATIENCE)
    assert running.end(signal.SIGTERM) == 0
    assert "worker did not stop in time and was killed" in running.told.read_text()


def test_the_state_of_an_earlier_run_is_not_taken_for_ours(start, tmp_path):
    (tmp_path / "state.json").write_text("{}")
    running = start("--no-restart")
    wait_for(lambda: "worker started" in running.log.read_text(), "the worker's start", PATIENCE)
    assert set(running.state()) == {"up", "worker", "manager", "store"}
    assert running.end(signal.SIGTERM) == 0


def test_a_named_store_is_used_and_left_alone(start, tmp_path):
    store = RedisProcess(tmp_path)
    store.start()
    try:
        running = start("--store-url", store.url)
        state = running.state()
        assert state["store"] == {"url": store.url, "pid": None}
        assert running.end(signal.SIGTERM) == 0
        assert redis_answers(store.url)
    finally:
        store.stop()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--store-url", "redis://:secret@127.0.0.1:1"], 1, "the store at redis://127.0.0.1:1/0 does not answer"),
        (["--store-url", "http://127.0.0.1:1"], 1, "store_url: must begin with redis://"),
        (["--store-url", "redis://x:1", "--store-port", "6379"], 2, "leave it out with --store-url"),
        (["--rows", "-1"], 1, "rows (--rows or SCISSORHANDS_WORKER_ROWS)"),
        (["--budget", "120%"], 2, "give a share above 0 and at most 1"),
        (["--policy", "nonsense"], 1, "nonsense"),
        (["--port", "7001", "--manager-port", "7001"], 1, "--manager-port and --port are both 7001"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1"),
        (["--state-file", "/nowhere/state.json"], 2, "--state-file: there is no folder /nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, code, message, tmp_path):
    state_file = tmp_path / "state.json"
    result = CliRunner().invoke(up, ["--model", "tiny", "--state-file", str(state_file), *FREE, *options])
    assert result.exit_code == code
    assert message in result.stderr
    assert "secret" not in result.stderr
    assert "waiting for" not in result.stderr


@pytest.mark.parametrize("option", ["--port", "--metrics-port", "--manager-port", "--manager-metrics-port"])
def test_a_taken_port_is_refused_with_its_option(option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(up, ["--model", "tiny", *FREE, option, str(port)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {option}: cannot listen on 127.0.0.1:{port}: Address already in use")


def test_the_options_of_the_worker_are_passed_on():
    result = CliRunner().invoke(up, ["--help"])
    for option in ("--rows", "--queue", "--threads", "--dtype", "--device", "--model"):
        assert f"  {option} " in result.stdout
    assert "--default-budget" not in result.stdout
