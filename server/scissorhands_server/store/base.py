"""The interface of the storage tier."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PageInfo:
    """A stored page: its name within its owner, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class StoreInfo:
    """What a store says about itself.

    Args:
        used_bytes: Memory that it takes.
        most_bytes: The most that it may take; 0 if there is no such bound.
        policy: What it does then, as Redis names it, such as ``noeviction``.
        hits: Keys that were looked up and found since it started.
        misses: Keys that were looked up in vain.
        evicted_keys: Keys that it dropped by itself, for want of memory.
    """

    used_bytes: int
    most_bytes: int
    policy: str
    hits: int
    misses: int
    evicted_keys: int


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
        """Write a page if it still holds ``expected`` (None: if it is absent); tell whether it was written.

        Without ``data`` it is deleted, which even a full store does.
        """

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
    async def time_left(self, owner: str, page: str) -> float:
        """Return for how long a page stays, in seconds; 0 if it is absent."""

    @abstractmethod
    async def run(self, owner: str, script: str, pages: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """Run a script on pages of one owner, as one step that nobody sees half done.

        Args:
            owner: Whose pages.
            script: A Lua script, as Redis runs them; what it finds in ``KEYS`` are the pages.
            pages: Names of all pages that it reads or writes.
            arguments: What it finds in ``ARGV``.

        Returns:
            What it returns: an integer, bytes, None, or a list of them.
        """

    @abstractmethod
    async def scan(self, cursor: str) -> tuple[str, list[tuple[str, str]]]:
        """Look at some of all pages, and tell the owner and the name of each.

        Pages that stay throughout are seen at least once; others may be missed.

        Args:
            cursor: Where to go on, as an earlier call told it; empty to begin.

        Returns:
            Where to go on, empty at the end, and what was found: some hundred pages, or none.
        """

    @abstractmethod
    async def info(self) -> StoreInfo:
        """Return what the store says about itself."""

    @abstractmethod
    async def close(self) -> None:
        """Free all connections."""
