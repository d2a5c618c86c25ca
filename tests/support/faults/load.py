"""Clients that compare every answer with the one that its question gets when nothing goes wrong."""

import asyncio
import time
from dataclasses import dataclass

import grpc
from support.faults.questions import Question

from scissorhands_client import Accepted, ClientError, Delta, Finish

# How much later than its deadline a call may end before it counts as hanging, in seconds.
LATE_SECONDS = 5
HANGS = "HANGS"


@dataclass(frozen=True)
class Outcome:
    """What became of a question.

    Args:
        question: The question.
        tokens: The tokens that came.
        code: Name of the status; ``HANGS`` if there was none long after the deadline.
        began: When it was asked, in seconds of ``time.monotonic``.
        seconds: How long it took.
        accepted: The first event, if there was one.
        finish: The last event, if it is whole.
        error: The client's error, if there was one.
    """

    question: Question
    tokens: tuple[int, ...]
    code: str
    began: float
    seconds: float
    accepted: Accepted | None
    finish: Finish | None
    error: ClientError | None

    @property
    def is_wrong(self):
        """Tell whether a token differs, or an answer that calls itself whole is not."""
        expected = self.question.tokens
        return self.tokens != (expected if self.code == "OK" else expected[: len(self.tokens)])


async def ask(client, question, *, timeout=10.0, after=0, then=None, pause=0.0):
    """Ask a question and return what became of it.

    Args:
        client: The worker's client.
        question: The question.
        timeout: The call's deadline, in seconds.
        after: Tokens after which ``then`` is called.
        then: Called once with the stream.
        pause: Seconds to wait before each event is read.
    """
    began, tokens, accepted, finish, error = time.monotonic(), [], None, None, None
    try:
        async with (
            asyncio.timeout(timeout + LATE_SECONDS),
            client.generate(question.prompt, question.options, timeout=timeout) as stream,
        ):
            async for event in stream:
                if isinstance(event, Accepted):
                    accepted = event
                elif isinstance(event, Delta):
                    tokens += event.token_ids
                elif isinstance(event, Finish):
                    finish = event
                if then is not None and len(tokens) >= after:
                    then = then(stream)
                if pause:
                    await asyncio.sleep(pause)
        code = grpc.StatusCode.OK.name
    except ClientError as raised:
        code, error = raised.code.name, raised
    except TimeoutError:
        code = HANGS
    return Outcome(question, tuple(tokens), code, began, time.monotonic() - began, accepted, finish, error)
