"""What the story of space knows of each kind of stored object: how to measure, check and delete one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from scissorhands.tenant import split
from scissorhands_server.store.base import PageStore
from scissorhands_server.store.registry import ObjectName

ROW, ARCHIVE, PREFIX = "row", "archive", "prefix"
# All kinds, and thus the values of the metric label ``kind``.
KINDS = (ROW, ARCHIVE, PREFIX)
# How long pages wait for what names them. Whoever writes them gives them this long, until all are there.
UNLISTED_SECONDS = 120.0


def owner_of(name: str) -> str:
    """Return the owner, in the store, of a session's pages."""
    return "/".join(split(name))


class Keeper(ABC):
    """Looks after the objects of one kind, of all tenants. Every method raises StoreUnavailableError.

    Names are qualified, as ``acme/chat`` (:mod:`scissorhands.tenant`).

    Args:
        store: Where they lie.
        ttl: How long they stay, in seconds.
    """

    kind: ClassVar[str]

    def __init__(self, store: PageStore, ttl: float) -> None:
        self._store = store
        self.ttl = ttl

    def object_name(self, name: str) -> ObjectName:
        """Return what the registry calls an object."""
        tenant, alone = split(name)
        return ObjectName(tenant, self.kind, alone)

    @abstractmethod
    async def remove(self, name: str, *, held: bool = False) -> bool:
        """Delete a whole object, whatever is left of it.

        Args:
            name: The object.
            held: Whether the caller itself holds it.

        Returns:
            False, and it stays, if a turn of somebody else holds it.
        """

    @abstractmethod
    async def measure(self, name: str) -> int:
        """Return an object's bytes; 0 if it is gone.

        Raises:
            MissingPartError: A part of it is missing, so it is of no use.
        """

    @abstractmethod
    async def verify(self, name: str) -> int:
        """Read all of an object, part by part, and check every checksum; return its bytes, 0 if it is gone.

        Raises:
            BrokenRowError: It is not whole.
            CorruptSegmentError: It is not whole.
        """

    @abstractmethod
    def named_by(self, owner: str, page: str) -> str | None:
        """Return the name, without the tenant, of the object that a page is of; None if of none of this kind.

        Args:
            owner: Owner of the page, without the tenant.
            page: The page.
        """

    @abstractmethod
    async def dead(self, name: str, pages: Sequence[str]) -> list[str]:
        """Return those of an object's pages that nothing names and nobody can still come to name."""

    async def _overdue(self, owner: str, page: str) -> bool:
        """Whether a page was listed so long ago that what names it should have followed."""
        return UNLISTED_SECONDS < await self._store.time_left(owner, page) < self.ttl - UNLISTED_SECONDS
