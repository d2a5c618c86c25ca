"""``scissorhands chat`` at a terminal: a real one, seen from its other end."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from support.scripted_worker import scripted_worker

# Longer than anything here takes, in seconds.
PATIENCE = 60.0


class Terminal:
    """A process at a terminal, which we read and type into."""

    def __init__(self, arguments):
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "120"},
        )
        os.close(theirs)
        self._unread = b""

    def expect(self, text):
        """Read up to the end of ``text`` and return what came before it."""
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; instead: {self._unread!r}"
            self._unread += os.read(self._ours, 4096)
        before, _, self._unread = self._unread.partition(text.encode())
        return before.decode()

    def type(self, text):
        os.write(self._ours, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def worker():
    with scripted_worker() as worker:
        yield worker


@pytest.fixture
def terminal(worker):
    terminal = Terminal([sys.executable, "-m", "scissorhands", "chat", "--server", worker.address])
    yield terminal
    terminal.close()


def test_a_conversation(worker, terminal):
    assert "/reset" in terminal.expect("> ")
    terminal.type("hello\r")
    terminal.expect("Héllo wörld")
    terminal.expect("6.25%")
    terminal.expect("> ")

    # Ctrl-C ends the answer, not the conversation.
    terminal.type("hang\r")
    terminal.expect("begun")
    terminal.process.send_signal(signal.SIGINT)  # What Ctrl-C becomes while nobody reads the line.
    terminal.expect("the turn is forgotten")
    assert worker.script.cancelled.wait(PATIENCE)

    # Neither does a refusal.
    terminal.expect("> ")
    terminal.type("refuse\r")
    terminal.expect("--top-p (sampling.top_p)")

    terminal.expect("> ")
    terminal.type("again\r")
    terminal.expect("Héllo wörld")
    turns = [each.content for each in worker.script.requests[-1].chat.messages]
    assert turns == ["hello", "Héllo wörld", "again"]

    terminal.expect("> ")
    terminal.type("/exit\r")
    assert terminal.process.wait(PATIENCE) == 0
