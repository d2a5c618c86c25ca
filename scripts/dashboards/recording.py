"""A system with a real Prometheus that scrapes it by the committed configuration, and what Prometheus answers."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).resolve().parents[2] / "docker" / "prometheus" / "prometheus.yml"
READY_SECONDS = 240.0
STOP_SECONDS = 60.0
ASK_SECONDS = 10.0
# How often Prometheus scrapes and evaluates here: often enough for a run of seconds.
INTERVAL = "1s"


@dataclass(frozen=True)
class Series:
    """What a query gave: the labels of one series, and its values by time, those that are numbers, oldest first."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The HTTP interface of a Prometheus.

    Args:
        address: Its base URL.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def ready(self) -> bool:
        """Return whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=ASK_SECONDS):  # noqa: S310 - our own
                return True
        except OSError:
            return False

    def at(self, expression: str) -> dict[str, float]:
        """Return the current values of an expression by instance."""
        found = self._get("query", query=expression)["result"]
        return {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}

    def over(self, expression: str, begin: float, end: float, step: float) -> list[Series]:
        """Return the series of an expression that had a value between two times, in seconds since the epoch."""
        found = self._get("query_range", query=expression, start=begin, end=end, step=step)["result"]
        series = (
            Series(
                each["metric"],
                tuple((at, float(value)) for at, value in each["values"] if not math.isnan(float(value))),
            )
            for each in found
        )
        return [each for each in series if each.points]

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules that it has loaded, with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ASK_SECONDS) as response:  # noqa: S310 - our own
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"Prometheus refuses {parameters.get('query', path)}: {error.read().decode()}") from error


@dataclass(frozen=True)
class Recording:
    """A running system that is recorded.

    Args:
        state: Addresses of its parts, as ``scissorhands up`` tells them.
        prometheus: What records it.
    """

    state: Mapping[str, Any]
    prometheus: Prometheus


@contextmanager
def recorded(
    folder: Path, model: Path, options: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Recording]:
    """Run ``scissorhands up`` and Prometheus on free ports, and stop both at the end.

    Args:
        folder: Where logs and measurements go.
        model: The model to serve.
        options: Further options of ``up``.
        environment: Further variables, such as the manager's settings.

    Raises:
        RuntimeError: Either did not start; the message quotes its log.
    """
    state = folder / "state.json"
    ports = ("--port", "0", "--metrics-port", "0", "--manager-port", "0", "--manager-metrics-port", "0")
    up = [sys.executable, "-m", "scissorhands", "up", "--model", str(model), "--state-file", str(state), *ports]
    with _process([*up, *options], folder / "up.log", environment or {}, state.exists):
        addresses = json.loads(state.read_text())
        targets = {
            f"scissorhands-{part}": urllib.parse.urlsplit(addresses[part]["metrics"]).netloc
            for part in ("worker", "manager")
        }
        with prometheus(folder, targets) as found:
            yield Recording(addresses, found)


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Run a Prometheus with the committed configuration, its rules included, and stop it at the end.

    Args:
        folder: Where its measurements go.
        targets: Where each job of the configuration is found instead, as ``host:port``.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("prometheus is not installed: make services")
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] |= {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(CONFIG.parent / pattern) for pattern in config.get("rule_files", ())]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    found = Prometheus(f"http://{address}")
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]

    def scraped() -> bool:
        """It takes some seconds until it scrapes: what happened before is no increase."""
        return found.ready() and sum(found.at("up").values()) == len(targets)

    with _process([*command, f"--web.listen-address={address}"], folder / "prometheus.log", {}, scraped):
        yield found


@contextmanager
def _process(
    command: list[str], log: Path, environment: Mapping[str, str], ready: Callable[[], bool]
) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})  # noqa: S603
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
