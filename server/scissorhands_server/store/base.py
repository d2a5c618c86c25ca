"""The interface of the storage tier."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageInfo:
    """A stored page: its name within its owner, and its size in bytes."""

    name: str
    size: int


class PageStore(ABC):
    """Keeps pages (strings of bytes) for a while. A page belongs to an owner, such as one tenant's session.

    An owner's pages lie together, so that one transaction reaches them all. Every method raises
    :class:`~scissorhands.errors.StoreUnavailableError` when the store does not answer or refuses.
    """

    @abstractmethod
    async def ping(self) -> None:
        """Return once the store has answered."""

    @abstractmethod
    async def put(self, owner: str, page: str, data: bytes, ttl: float) -> None:
        """Write one page, at least one byte long. It is not listed until it is committed.

        Args:
            owner: Whose page.
            page: Its name.
            data: Its bytes.
            ttl: How long it stays, in seconds.
        """

    @abstractmethod
    async def commit(self, owner: str, pages: Sequence[str], ttl: float) -> None:
        """List pages that have been put, all or none of them; list and pages stay for ``ttl`` seconds from now."""

    @abstractmethod
    async def compare_and_set(self, owner: str, page: str, expected: bytes | None, data: bytes, ttl: float) -> bool:
        """Write a page if it still holds ``expected`` (None: if it is absent); tell whether it was written."""

    @abstractmethod
    async def get(self, owner: str, page: str) -> bytes | None:
        """Read a whole page; None if it is absent."""

    @abstractmethod
    async def get_range(self, owner: str, page: str, start: int, size: int) -> bytes:
        """Read ``size`` bytes from ``start``; fewer at the end of the page, none if it is absent."""

    @abstractmethod
    async def delete(self, owner: str, pages: Sequence[str]) -> int:
        """Delete pages and take them off the list; return how many there were."""

    @abstractmethod
    async def list_pages(self, owner: str) -> list[PageInfo]:
        """Return the committed pages that are still there, in the order of their names."""

    @abstractmethod
    async def stat(self, owner: str, page: str) -> PageInfo | None:
        """Describe a page, committed or not; None if it is absent."""

    @abstractmethod
    async def close(self) -> None:
        """Free all connections."""
