"""From the client's errors to exit codes and one line that says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from scissorhands.credentials import connection_hint
from scissorhands_client.errors import (
    ClientError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ServerUnavailableError,
)

# What sets a field of a request; the longest prefix counts.
_SOURCES = {
    "budget": "--budget",
    "ca_file": "--ca-file",
    "certificate": "--certificate",
    "chat": "PROMPT",
    "key": "--key",
    "max_new_tokens": "--max-new-tokens",
    "policy": "--policy",
    "policy.parameters": "--param",
    "prompt": "PROMPT",
    "sampling.repetition_penalty": "--repetition-penalty",
    "sampling.seed": "--seed",
    "sampling.temperature": "--temperature",
    "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p",
    "server_name": "--server-name",
    "session_id": "ID",
    "stop": "--stop",
    "text": "PROMPT",
    "timeout": "--timeout",
    "token_file": "--token-file",
}


class Failure(click.ClickException):
    """A failure that is told in one line; the process exits with 1."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class BadRequestFailure(Failure):
    """The server refused a field of the request."""

    exit_code = 2


class InterruptedFailure(Failure):
    """Ctrl-C was pressed."""

    exit_code = 130


@contextmanager
def reported(server: str) -> Iterator[None]:
    """Turn the client's errors and Ctrl-C into exit codes.

    Args:
        server: Address that is being talked to, for the message.

    Raises:
        Failure: The block raised an error of the client, or Ctrl-C was pressed.
    """
    try:
        yield
    except ClientError as error:
        raise failure(error, server) from error
    except KeyboardInterrupt:
        raise InterruptedFailure("cancelled") from None


def failure(error: ClientError, server: str) -> Failure:
    """Return how an error is told."""
    if isinstance(error, InvalidRequestError):
        return BadRequestFailure(_refused(error))
    if isinstance(error, OverloadedError):
        return Failure(f"the server is full: {error}; try again in {error.retry_after:g} s")
    if hint := connection_hint(error.details, "--"):
        return Failure(
            f"no connection to {server}: {hint} ({error.details.removesuffix(f'; {connection_hint(error.details)}')})"
        )
    # With a reason it is the server that speaks; without one nothing answered.
    if isinstance(error, ServerUnavailableError) and not error.info.reason:
        return Failure(
            f"nothing answers at {server} ({error}); "
            "start it with 'scissorhands up --model MODEL' or name the right address"
        )
    if isinstance(error, DeadlineExceededError):
        return Failure(f"no complete answer from {server} in time ({error}); allow more with --timeout")
    return Failure(str(error))


def _refused(error: InvalidRequestError) -> str:
    if not error.field:
        return error.allowed
    matches = [field for field in _SOURCES if error.field == field or error.field.startswith(f"{field}.")]
    if not matches:
        return f"{error.field}: {error.allowed}"
    return f"{_SOURCES[max(matches, key=len)]} ({error.field}): {error.allowed}"
