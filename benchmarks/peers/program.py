"""Talking to ``kvpress_losses.py``, which runs in another environment: a request as a file, answers line by line."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from scissorhands.errors import ScissorhandsError
from scissorhands.evaluation.statistics import Losses
from scissorhands.evaluation.texts import Tokens

PROGRAM = Path(__file__).resolve().with_name("kvpress_losses.py")

# Between two lines lies at most a forward pass of all sequences, or the check of one press.
SILENCE_SECONDS = 1800.0
_TAIL_CHARACTERS = 600

Message = dict[str, Any]
Result = TypeVar("Result")


class PeerError(ScissorhandsError):
    """The other program failed or fell silent."""


class Program:
    """The other program, for one model and one set of sequences.

    Args:
        command: Starts it: the interpreter and the file.
        folder: Where requests and losses are written; the caller removes it.
        model: A folder or a hub id.
        tokens: ``[sequences, length]``.
        dtype: The torch type of weights and cache.
        silence: Longest time without an answer, in seconds; then it is killed.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        model: str,
        tokens: Tokens,
        dtype: str,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._command = command
        self._folder = folder
        self._silence = silence
        self._common = {"model": model, "dtype": dtype, "tokens": str(folder / "tokens.npy")}
        self._shape = (tokens.shape[0], tokens.shape[1] - 1)
        np.save(self._common["tokens"], tokens)

    def check(self, tasks: list[Message], found: Callable[[Message], object]) -> None:
        """Try each task on a short run, and tell ``found`` of each: ``{"error"}`` or ``{"feeding", "verdict"}``.

        Raises:
            PeerError: The program failed or fell silent.
        """
        self._call("check", {"tasks": tasks}, found)

    def measure(self, task: Message, advance: Callable[[int], object]) -> tuple[Losses, Message]:
        """Measure a task.

        Args:
            task: See :meth:`benchmarks.peers.presses.Peer.task`.
            advance: Told how many more tokens are done.

        Returns:
            Losses ``[sequences, length - 1]`` in nats, and the fields of ``kvpress_losses.Outcome``.

        Raises:
            PeerError: The program failed, fell silent or answered with something else.
        """
        path, last = self._folder / "losses.npy", {}

        def take(message: Message) -> None:
            advance(message.get("done", 0))
            last.update(message)

        self._call("measure", {"task": task, "losses": str(path)}, take)
        losses: Losses = np.load(path, allow_pickle=False)
        if losses.shape != self._shape or "outcome" not in last:
            raise PeerError(f"{PROGRAM.name} gave losses {losses.shape} instead of {self._shape}, or no outcome")
        return losses, last["outcome"]

    def _call(self, verb: str, request: Message, take: Callable[[Message], object]) -> None:
        path = self._folder / "request.json"
        path.write_text(json.dumps({**self._common, **request}), encoding="utf-8")
        asyncio.run(_converse([*self._command, verb, str(path)], self._folder / "log.txt", take, self._silence))


async def _converse(command: list[str], log: Path, take: Callable[[Message], object], silence: float) -> None:
    """Run a command that prints one JSON object a line.

    Args:
        command: The command.
        log: Where what it writes to standard error goes.
        take: Takes the objects.
        silence: Longest time without a line, in seconds; then it is killed.

    Raises:
        PeerError: It failed, fell silent, or printed something else.
    """
    # What the model needs has been fetched by our side; presses that would fetch more must fail at once.
    # Programs of the other environment come first: quanto compiles its unpacking with its ninja.
    search = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": search}
    with log.open("wb") as errors:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=errors, env=environment
            )
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be started: {error}") from error
        assert process.stdout is not None
        try:
            while line := await _within(silence, process.stdout.readline()):
                take(json.loads(line))
            code = await _within(silence, process.wait())
        except TimeoutError as error:
            raise PeerError(f"{command[1]} printed nothing for {silence:g} s") from error
        except ValueError as error:
            raise PeerError(f"{command[1]} printed something else than JSON: {error}") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code:
        raise PeerError(f"{command[1]} ended with status {code}: {_tail(log)}")


async def _within(seconds: float, waiting: Awaitable[Result]) -> Result:
    async with asyncio.timeout(seconds):
        return await waiting


def _tail(log: Path) -> str:
    """Return the end of a log, where a traceback says what is wrong, on one line."""
    return " ".join(log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].split())
