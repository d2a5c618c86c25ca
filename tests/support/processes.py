"""Real servers as processes: a Redis that can be killed and stopped, and a manager."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from urllib.request import urlopen

from support.forked import ForkedProgram

START_SECONDS = 60
STOP_SECONDS = 30


# Below the ports that Linux gives to outgoing connections, which else may take one before its server does.
PORTS = range(15000, 32000)


def free_port():
    """Return a port that was free a moment ago."""
    while True:
        port = random.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for(condition, what, seconds=START_SECONDS):
    """Return what ``condition()`` returns as soon as that is true; fail when it does not become true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.02)
    return found


class RedisProcess:
    """Debian's redis-server on a port of its own, in memory only.

    Args:
        folder: Where it runs.
        options: Further words of its command line.
        config: Configuration file of a sentinel, which it then is.
    """

    def __init__(self, folder, *options, config=None):
        program = shutil.which("redis-server")
        assert program, "redis-server is not installed: apt-get install redis-server"
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        listening = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        kind = [str(config), *listening, "--sentinel"] if config else [*listening, "--save", ""]
        self._command = [program, *kind, *options]
        self._process = None

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self):
        return self._process.pid

    def add_options(self, *options):
        """Add words to its command line."""
        self._command += options

    def start(self):
        """Start it, on the same port every time, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "redis-server")

    def kill(self):
        """Kill it, as a crash does."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def pause(self):
        """Stop it with SIGSTOP: it keeps its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self):
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def ended(self):
        """Tell whether it was started and is gone."""
        return self._process is not None and self._process.poll() is not None

    def stop(self):
        """End it, whatever its state."""
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self.kill()

    def holds_nothing(self):
        """Tell whether nothing is stored, but for the lease that a manager's janitor holds while it looks."""
        lease = b"scissorhands:{janitor}:lease"
        return self.command("KEYS", "*") in (b"*0\r\n", b"*1\r\n$%d\r\n%s\r\n" % (len(lease), lease))

    def command(self, *words):
        """Send one command and return the raw reply, of at most 64 KiB."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            return connection.recv(1 << 16)

    def _answers(self):
        assert self._process.poll() is None, "redis-server ended by itself"
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False


class ManagerProcess:
    """``scissorhands manager`` as a process of its own, on free ports unless told otherwise.

    Args:
        prepare: Called in its process before it begins.
        options: Its settings.
    """

    def __init__(self, prepare=None, **options):
        self._prepare = prepare
        self._options = {"port": 0, "metrics_port": 0, **options}
        self._start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def restart(self):
        """Start it again, after it was killed, on the ports that it had."""
        self._options.update(port=self.port, metrics_port=self.metrics_port)
        self._start()

    def _start(self):
        words = [word for name, value in self._options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SCISSORHANDS_")}
        reading, writing = os.pipe()
        self._output = os.fdopen(reading)
        try:
            self._process = ForkedProgram(
                "manager", *words, stdout=writing, environment=environment, prepare=self._prepare
            )
        finally:
            os.close(writing)
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.address = self._line(r"manager ready on (\S+)")
            self.metrics_url = self._line(r"metrics on (\S+)")
        except BaseException:
            self.stop()
            raise

    @property
    def port(self):
        return int(self.address.rpartition(":")[2])

    @property
    def metrics_port(self):
        return int(self.metrics_url.removesuffix("/metrics").rpartition(":")[2])

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        """Kill it, as a crash does."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def send(self, number):
        """Send it a signal."""
        self._process.send_signal(number)

    def ended(self):
        """Tell whether it is gone."""
        return self._process.poll() is not None

    def wait(self):
        """Wait until it has ended, and return its exit status."""
        return self._process.wait(STOP_SECONDS)

    def terminate(self):
        """Ask it to stop, and return its exit status."""
        self.send(signal.SIGTERM)
        return self.wait()

    def stop(self):
        """End it, whatever its state."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except TimeoutError:
                self.kill()
        self._reader.join(STOP_SECONDS)
        self._output.close()

    def scrape(self):
        """Return the text of its metrics."""
        with urlopen(self.metrics_url, timeout=10) as response:
            return response.read().decode()

    def metric(self, series):
        """Return the value of one series, such as ``sessions{state="open"}``; the common prefix is left out."""
        values = samples(self.scrape())
        return values[f"scissorhands_manager_{series}"]

    def _read(self):
        for line in self._output:
            self.lines.append(line.rstrip())

    def _line(self, pattern):
        """Return what the pattern finds in the lines printed so far, or later."""

        def found():
            matches = [match for line in list(self.lines) if (match := re.search(pattern, line))]
            assert matches or self._process.poll() is None, f"the manager ended: {self.lines}"
            return matches

        return wait_for(found, f"a line like {pattern!r}")[0][1]


def samples(text):
    """Return the values of all series in a text of metrics."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
