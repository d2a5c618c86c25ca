"""Looking at servers again and again."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from scissorhands.errors import UnavailableError
from scissorhands_server.top.scrape import Scrape, scrape

State = TypeVar("State")
# Endpoints that are read at once: one that hangs holds up nobody else.
_AT_ONCE = 16


@dataclass(frozen=True)
class Silent:
    """A server that does not answer.

    Args:
        endpoint: Its metrics endpoint.
        why: What happened.
    """

    endpoint: str
    why: str


class Servers(Generic[State]):
    """Servers of one kind.

    Args:
        endpoints: Their metrics endpoints.
        state: Tells what one is doing, from its endpoint and two looks.
    """

    def __init__(self, endpoints: Sequence[str], state: Callable[[str, Scrape, Scrape], State]) -> None:
        self._endpoints = tuple(endpoints)
        self._state = state
        self._before: dict[str, Scrape] = {}

    def look(self) -> list[State | Silent]:
        """Tell what each is doing since the look before; at the first look, rates are 0."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._one, self._endpoints))

    def _one(self, endpoint: str) -> State | Silent:
        try:
            now = scrape(endpoint)
        except UnavailableError as error:
            self._before.pop(endpoint, None)
            return Silent(endpoint, str(error))
        before = self._before.get(endpoint, now)
        self._before[endpoint] = now
        return self._state(endpoint, before, now)
