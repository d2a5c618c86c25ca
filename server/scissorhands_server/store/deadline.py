"""A deadline for every call to the store."""

import asyncio
from collections.abc import Awaitable, Callable

from scissorhands.errors import StoreUnavailableError
from scissorhands_server.store.base import PageStore
from scissorhands_server.store.decorator import Result, StoreDecorator


class DeadlineStore(StoreDecorator):
    """Gives up on calls that take too long, whatever they wait for: a connection, a reply or a full pipe.

    Args:
        inner: The store.
        seconds: The most that one call may take.
    """

    def __init__(self, inner: PageStore, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    async def guard(self, method: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make the call within the deadline.

        Raises:
            StoreUnavailableError: It took too long.
        """
        try:
            async with asyncio.timeout(self._seconds):
                return await call()
        except TimeoutError as error:
            raise StoreUnavailableError(f"{method} took more than {self._seconds:g} s", "timeout") from error
