"""The base of the stores that add one concern to another store."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from scissorhands_server.store.base import PageInfo, PageStore, StoreInfo

Result = TypeVar("Result")

# The names that decorators see, and thus the values of the metric label ``method``.
METHODS = (
    "ping",
    "put",
    "commit",
    "compare_and_set",
    "get",
    "get_range",
    "delete",
    "list_pages",
    "stat",
    "time_left",
    "run",
    "scan",
    "info",
)


class StoreDecorator(PageStore):
    """Passes every call through :meth:`guard`, the one method that an author writes."""

    def __init__(self, inner: PageStore) -> None:
        self._inner = inner

    @abstractmethod
    async def guard(self, method: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make the call, or refuse to.

        Args:
            method: Its name, one of :data:`METHODS`.
            call: Makes it on the inner store.
        """

    async def ping(self) -> None:
        """See :class:`PageStore`."""
        await self.guard("ping", self._inner.ping)

    async def put(self, owner: str, page: str, data: bytes, ttl: float) -> None:
        """See :class:`PageStore`."""
        await self.guard("put", lambda: self._inner.put(owner, page, data, ttl))

    async def commit(self, owner: str, pages: Sequence[str], ttl: float) -> None:
        """See :class:`PageStore`."""
        await self.guard("commit", lambda: self._inner.commit(owner, pages, ttl))

    async def compare_and_set(self, owner: str, page: str, expected: bytes | None, data: bytes, ttl: float) -> bool:
        """See :class:`PageStore`."""
        return await self.guard(
            "compare_and_set", lambda: self._inner.compare_and_set(owner, page, expected, data, ttl)
        )

    async def get(self, owner: str, page: str) -> bytes | None:
        """See :class:`PageStore`."""
        return await self.guard("get", lambda: self._inner.get(owner, page))

    async def get_range(self, owner: str, page: str, start: int, size: int) -> bytes:
        """See :class:`PageStore`."""
        return await self.guard("get_range", lambda: self._inner.get_range(owner, page, start, size))

    async def delete(self, owner: str, pages: Sequence[str]) -> int:
        """See :class:`PageStore`."""
        return await self.guard("delete", lambda: self._inner.delete(owner, pages))

    async def list_pages(self, owner: str) -> list[PageInfo]:
        """See :class:`PageStore`."""
        return await self.guard("list_pages", lambda: self._inner.list_pages(owner))

    async def stat(self, owner: str, page: str) -> PageInfo | None:
        """See :class:`PageStore`."""
        return await self.guard("stat", lambda: self._inner.stat(owner, page))

    async def time_left(self, owner: str, page: str) -> float:
        """See :class:`PageStore`."""
        return await self.guard("time_left", lambda: self._inner.time_left(owner, page))

    async def run(self, owner: str, script: str, pages: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """See :class:`PageStore`."""
        return await self.guard("run", lambda: self._inner.run(owner, script, pages, arguments))

    async def scan(self, cursor: str) -> tuple[str, list[tuple[str, str]]]:
        """See :class:`PageStore`."""
        return await self.guard("scan", lambda: self._inner.scan(cursor))

    async def info(self) -> StoreInfo:
        """See :class:`PageStore`."""
        return await self.guard("info", self._inner.info)

    async def close(self) -> None:
        """Close the inner store."""
        await self._inner.close()
