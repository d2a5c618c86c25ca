"""Decoding with kvpress, run by run: our end of ``kvpress_decoding.py``, which runs in the other environment."""

import json
import os
import subprocess
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.presses import PEERS
from benchmarks.peers.program import PeerError
from scissorhands.errors import InvalidRequestError

PROGRAM = Path(__file__).resolve().with_name("kvpress_decoding.py")
# Loading, filling caches and one run of each case all stay below.
SILENCE_SECONDS = 300.0


def describe(press: str, interval: int, target: int, rows: int, steady_steps: int) -> dict[str, Any]:
    """Return a case as ``kvpress_decoding.py`` takes it.

    Args:
        press: A name of :data:`benchmarks.peers.presses.PEERS`.
        interval: Tokens between compressions.
        target: Tokens that one leaves.
        rows: Rows of the batch.
        steady_steps: Steps of a run in the middle of a long interval; a short one is run from end to end.

    Raises:
        InvalidRequestError: There is no such press.
    """
    peer = next((peer for peer in PEERS if peer.name == press and peer.press), None)
    if peer is None:
        raise InvalidRequestError("press", f"unknown: {press!r}; benchmarks/peers/presses.py lists them")
    whole = interval <= 4 * steady_steps
    return {
        "name": f"kvpress:{press}@{interval}",
        "press": peer.press,
        "buffer": peer.buffer,
        "interval": interval,
        "target": target,
        "rows": rows,
        "steps": interval if whole else steady_steps,
        "start": target if whole else target + interval // 2,
    }


class Decoding:
    """The other program with its cases ready; a context.

    Args:
        python: The other environment's interpreter; None starts nothing.
        model: A folder or a hub id.
        cases: See :func:`describe`.

    Attributes:
        peak_bytes: Of each case, the most bytes of keys and values, of all rows, before a compression.
    """

    def __init__(self, python: Path | None, model: str, cases: list[dict[str, Any]]) -> None:
        self.peak_bytes: dict[str, int] = {}
        self._command = [str(python), str(PROGRAM), json.dumps({"model": model, "cases": cases})] if python else None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the program and wait until its caches are filled.

        Raises:
            PeerError: It failed or fell silent.
        """
        if self._command:
            self._process = subprocess.Popen(  # noqa: S603 - only what stands above
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            self.peak_bytes = self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the program."""
        if self._process:
            self._process.kill()
            self._process.communicate()

    def run(self, name: str) -> None:
        """Run one case and wait until it is through.

        Raises:
            PeerError: The program failed or fell silent.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"{PROGRAM.name} is gone: {error}") from error
        self._answer()

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        limit = Timer(SILENCE_SECONDS, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise PeerError(f"{PROGRAM.name} failed, or was silent for {SILENCE_SECONDS:g} s; see its errors above")
        return json.loads(line)
