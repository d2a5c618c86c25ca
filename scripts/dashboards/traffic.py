"""Traffic that takes every path that a panel shows."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from scissorhands_client import (
    Budget,
    Client,
    ClientError,
    Delta,
    GenerateOptions,
    InvalidRequestError,
    OverloadedError,
    Priority,
    Prompt,
    Result,
    TokenIds,
)

# Makes the paths short: rows for two, prefixes of prompts as small as these, and a store that overflows.
ROWS = 2
OPTIONS = ("--rows", str(ROWS), "--queue", "3", "--prefix-tokens", "64", "--prefix-advantage", "0")
ENVIRONMENT = {"SCISSORHANDS_MANAGER_JANITOR_INTERVAL": "1"}
POLICIES = ("scissorhands", "h2o", "streaming", "tova")
REQUEST_SECONDS = 300.0


@dataclass(frozen=True)
class Scale:
    """How much is asked for; prompts fit the model, and budgets evict.

    Args:
        prompt: Makes a prompt of about so many tokens, another one for each number.
        tokens: Tokens of a prompt.
        new: Tokens of an answer.
        slots: The budget.
    """

    prompt: Callable[[int, int], Prompt]
    tokens: int
    new: int
    slots: int


class Traffic:
    """Asks a worker for answers in all ways there are.

    Args:
        worker: Its address.
        scale: How much is asked for.
    """

    def __init__(self, worker: str, scale: Scale) -> None:
        self._worker = worker
        self._scale = scale
        self._numbers = count()

    def run(self) -> None:
        """Take every path once."""
        with Client(self._worker, timeout=REQUEST_SECONDS) as client:
            for path in self.paths():
                path(client)

    def paths(self) -> Iterator[Callable[[Client], None]]:
        """Return the paths."""
        yield from (self._evict, self._pack, self._compare, self._recall, self._keep, self._share)
        yield from (self._cancel, self._refuse, self._crowd, self._preempt)

    def _options(self, **more: object) -> GenerateOptions:
        chosen = {"budget": Budget.tokens(self._scale.slots), "max_new_tokens": self._scale.new, "ignore_eos": True}
        return GenerateOptions(**{**chosen, "prefix_cache": False, **more})  # type: ignore[arg-type]

    def _prompt(self) -> Prompt:
        return self._scale.prompt(next(self._numbers), self._scale.tokens)

    def _ask(self, client: Client, **more: object) -> None:
        client.generate(self._prompt(), self._options(**more)).result()

    def _evict(self, client: Client) -> None:
        for policy in POLICIES:
            self._ask(client, policy=policy)

    def _pack(self, client: Client) -> None:
        self._ask(client, resident_codec="int4")

    def _compare(self, client: Client) -> None:
        self._ask(client, shadow=True)

    def _recall(self, client: Client) -> None:
        self._ask(client, recall=0.5, recall_every=4)

    def _keep(self, client: Client) -> None:
        """Two turns of a session."""
        options = self._options(session_id=f"conversation-{time.time_ns()}")
        first = self._prompt()
        said = client.generate(first, options).result()
        client.generate(_continued(first, said, self._prompt()), options).result()

    def _share(self, client: Client) -> None:
        """The same prompt twice."""
        prompt = self._prompt()
        for _ in range(2):
            client.generate(prompt, self._options(prefix_cache=True)).result()

    def _cancel(self, client: Client) -> None:
        with client.generate(self._prompt(), self._options()) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    return

    def _refuse(self, client: Client) -> None:
        try:
            self._ask(client, budget=Budget.tokens(1))
        except InvalidRequestError:
            return
        raise AssertionError("a budget of one slot was granted")

    def _crowd(self, client: Client) -> None:
        """More than rows and queue hold."""
        self._at_once([lambda: self._ask(client)] * 8, OverloadedError)

    def _preempt(self, client: Client) -> None:
        """Urgent requests while every row is taken."""
        begun = threading.Semaphore(0)

        def slow() -> None:
            options = self._options(priority=Priority.LOW, max_new_tokens=2 * self._scale.new)
            for event in client.generate(self._prompt(), options):
                if isinstance(event, Delta):
                    begun.release()

        def urgent() -> None:
            for _ in range(ROWS):
                begun.acquire(timeout=REQUEST_SECONDS)
            self._ask(client, priority=Priority.HIGH)

        self._at_once([slow] * ROWS + [urgent], OverloadedError)

    def _at_once(self, calls: list[Callable[[], None]], expected: type[ClientError]) -> None:
        failures: list[Exception] = []

        def guarded(call: Callable[[], None]) -> None:
            try:
                call()
            except expected:
                return
            except Exception as error:  # noqa: BLE001 - told by the thread that waits
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def _continued(prompt: Prompt, said: Result, more: Prompt) -> Prompt:
    """Return what comes after an answer: the conversation up to there, and more."""
    if isinstance(prompt, TokenIds) and isinstance(more, TokenIds):
        return TokenIds((*prompt.ids, *said.token_ids, *more.ids))
    return f"{prompt}{said.text} {more}"
