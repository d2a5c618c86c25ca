"""The supervisor with small shell scripts as its children."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, nullcontext

import pytest
from support.liveness import alive

from scissorhands_server.up.child import ChildCommand
from scissorhands_server.up.supervisor import Patience, Supervisor, SupervisorError, Watched

# Longer than anything here takes, in seconds.
PATIENCE = 30.0
# Notes what it does in the file that the test reads, is ready when its own file exists, and stops when asked to.
OBEDIENT = """
note() { echo "$NAME $1" >> "$LOG"; }
trap 'note stopped; exit 0' TERM
note started; echo "$NAME says hello"; note ready; touch "$READY"
while :; do sleep 0.05; done
"""
STUBBORN = 'trap "" TERM; touch "$READY"; while :; do sleep 0.05; done'
NEVER_READY = 'echo "waiting for nothing"; while :; do sleep 0.05; done'
FAILS = 'echo "all is well"; echo "no, it is not" >&2; exit 3'
FAILS_ONCE_READY = 'touch "$READY"; sleep 0.3; exit 4'


class Heard:
    """Keeps what an output would print."""

    def __init__(self):
        self.lines = []

    def line(self, name, text):
        self.lines.append((name, text))

    def waiting(self, text):
        return nullcontext()


class Stage:
    """A supervisor over scripts."""

    def __init__(self, folder, scripts, **patience):
        self.folder = folder
        self.heard = Heard()
        self.changed = []
        patience = {"ready": PATIENCE, "grace": PATIENCE, "backoff": 0.01, **patience}
        watched = [self._watched(name, script) for name, script in scripts.items()]
        self.supervisor = Supervisor(watched, Patience(**patience), self.heard, self.changed.append)

    def _watched(self, name, script):
        ready = self.folder / f"{name}.ready"
        environment = {"NAME": name, "LOG": str(self.folder / "log"), "READY": str(ready)}

        async def probe():
            return "" if ready.exists() else "no file"

        return Watched(ChildCommand(name, ["sh", "-c", script], environment), probe)

    def noted(self):
        return (self.folder / "log").read_text().splitlines()

    def pid(self, name):
        return self.supervisor.pids[name]

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def stage(folder, scripts, **patience):
    stage = Stage(folder, scripts, **patience)
    try:
        yield stage
    finally:
        await stage.supervisor.stop(0)
        assert not any(alive(pid) for pid in stage.supervisor.pids.values() if pid)


async def test_children_start_in_order_and_stop_in_the_opposite_one(tmp_path):
    async with stage(tmp_path, {"first": OBEDIENT, "second": OBEDIENT}) as it:
        await it.supervisor.start()
        await it.supervisor.stop()
        assert it.noted() == [
            "first started",
            "first ready",
            "second started",
            "second ready",
            "second stopped",
            "first stopped",
        ]
        assert ("first", "first says hello") in it.heard.lines
        assert not any("killed" in text for _, text in it.heard.lines)


async def test_one_that_is_never_ready_is_told_with_its_last_line(tmp_path):
    async with stage(tmp_path, {"first": NEVER_READY, "second": OBEDIENT}, ready=0.5) as it:
        with pytest.raises(SupervisorError, match=r"first was not ready after 0.5 s; its last line: waiting for noth"):
            await it.supervisor.start()
        assert it.pid("second") == 0


async def test_one_that_ends_before_it_is_ready_is_told_and_not_started_again(tmp_path):
    async with stage(tmp_path, {"first": FAILS}) as it:
        with pytest.raises(SupervisorError, match="it ended with exit status 3; its last line: no, it is not"):
            await it.supervisor.start()
        assert it.heard.lines == [("first", "all is well"), ("first", "no, it is not")]


async def test_a_program_that_does_not_exist(tmp_path):
    async with stage(tmp_path, {"first": "exec /nowhere/program"}) as it:
        with pytest.raises(SupervisorError, match="first did not become ready: it ended with exit status 127"):
            await it.supervisor.start()


async def test_one_that_is_killed_is_started_again(tmp_path):
    async with stage(tmp_path, {"first": OBEDIENT, "second": OBEDIENT}) as it:
        await it.supervisor.start()
        keeping = asyncio.create_task(it.supervisor.keep())
        other = it.pid("second")
        for round_number in (1, 2):
            before = it.pid("first")
            (tmp_path / "first.ready").unlink()
            os.kill(before, signal.SIGKILL)
            await it.until(lambda number=round_number: len(it.changed) == number)
            assert it.pid("first") != before
        assert it.changed == ["first", "first"]
        assert it.pid("second") == other
        told = [text for name, text in it.heard.lines if name == "up" and "again" in text]
        assert told == [
            "first was killed by SIGKILL; starting it again in 0.01 s",
            "first was killed by SIGKILL; starting it again in 0.02 s",
        ]
        assert not keeping.done()
        keeping.cancel()


async def test_without_restart_the_end_of_one_is_the_end_of_all(tmp_path):
    async with stage(tmp_path, {"first": OBEDIENT, "second": OBEDIENT}, restart=False) as it:
        await it.supervisor.start()
        keeping = asyncio.create_task(it.supervisor.keep())
        os.kill(it.pid("second"), signal.SIGKILL)
        with pytest.raises(SupervisorError, match="second was killed by SIGKILL"):
            await asyncio.wait_for(keeping, PATIENCE)
        assert it.changed == []


async def test_failures_in_a_row_are_bounded(tmp_path):
    async with stage(tmp_path, {"first": FAILS_ONCE_READY}, failures=3, steady=PATIENCE) as it:
        await it.supervisor.start()
        with pytest.raises(SupervisorError, match="first failed 4 times in a row; at last it ended with exit status 4"):
            await asyncio.wait_for(it.supervisor.keep(), PATIENCE)
        assert len(it.changed) == 3


async def test_failures_before_it_is_ready_again_are_in_a_row_however_long_they_take(tmp_path):
    script = f'if [ -e "$LOG" ]; then {FAILS}; fi; touch "$LOG"; {FAILS_ONCE_READY}'
    async with stage(tmp_path, {"first": script}, failures=3, steady=0.0) as it:
        await it.supervisor.start()
        keeping = asyncio.create_task(it.supervisor.keep())
        (tmp_path / "first.ready").unlink()
        with pytest.raises(SupervisorError, match="first failed 4 times in a row"):
            await asyncio.wait_for(keeping, PATIENCE)
        assert it.changed == []


async def test_one_that_does_not_stop_is_killed(tmp_path):
    async with stage(tmp_path, {"first": STUBBORN, "second": OBEDIENT}, grace=0.5) as it:
        await it.supervisor.start()
        os.kill(it.pid("second"), signal.SIGSTOP)
        await it.supervisor.stop()
        told = [text for name, text in it.heard.lines if "stop in time" in text]
        assert told == ["second did not stop in time and was killed", "first did not stop in time and was killed"]


async def test_long_and_broken_lines_are_passed_on(tmp_path):
    script = "printf 'a%.0s' $(seq 20000); printf '\\n\\377\\n'; printf 'no end'; " + OBEDIENT
    async with stage(tmp_path, {"first": script}) as it:
        await it.supervisor.start()
        await it.until(lambda: ("first", "no endfirst says hello") in it.heard.lines)
        lines = [text for name, text in it.heard.lines if name == "first"]
        assert "".join(lines[:-2]) == "a" * 20000
        assert lines[-2] == "\ufffd"


SCRIPT = """
import asyncio, sys
from scissorhands_server.up.child import ChildCommand
from scissorhands_server.up.output import Output
from scissorhands_server.up.supervisor import Patience, Supervisor, Watched

async def ready():
    return ""

async def main():
    commands = [ChildCommand(name, ["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 1; done"]) for name in "ab"]
    supervisor = Supervisor([Watched(each, ready) for each in commands], Patience(), Output(), lambda name: None)
    await supervisor.start()
    print(*supervisor.pids.values(), flush=True)
    await supervisor.keep()

asyncio.run(main())
"""


def test_killing_the_supervisor_leaves_no_child():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2
            assert all(alive(pid) for pid in pids)
        finally:
            process.kill()
    deadline = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a child is left"
        time.sleep(0.01)
