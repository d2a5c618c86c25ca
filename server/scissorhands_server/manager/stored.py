"""Segments as they lie in the store: written whole, read by range, every byte checked."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from scissorhands.errors import CorruptSegmentError, NotFoundError
from scissorhands.segment import (
    START_BYTES,
    Section,
    SegmentHeader,
    check_section,
    header_size,
    parse_header,
)
from scissorhands.tenant import qualified
from scissorhands_server.manager.keeper import ARCHIVE, UNLISTED_SECONDS, Keeper, owner_of

# What is read at first: the header of all but the largest models, in one go.
_FIRST_READ_BYTES = 64 << 10
# Neighboring sections are read together up to this many bytes.
_READ_BYTES = 4 << 20
_PAGE_PREFIX = "segment:"


class StoredSegments(Keeper):
    """Reads and writes segments.

    Args:
        store: Where they lie.
        ttl: How long a segment stays, in seconds.
    """

    kind = ARCHIVE

    async def write(self, session_id: str, epoch: int, data: bytes) -> None:
        """Store a segment; it is listed once it is whole."""
        owner, page = owner_of(session_id), _page(epoch)
        await self._store.put(owner, page, data, min(self.ttl, UNLISTED_SECONDS))
        await self._store.commit(owner, [page], self.ttl)

    async def sizes(self, session_id: str) -> dict[int, int]:
        """Return the bytes of each segment of a session, by epoch, oldest first."""
        pages = await self._store.list_pages(owner_of(session_id))
        named = ((page.name.removeprefix(_PAGE_PREFIX), page) for page in pages if page.name.startswith(_PAGE_PREFIX))
        sizes = {int(epoch): page.size for epoch, page in named}
        return dict(sorted(sizes.items()))

    async def delete(self, session_id: str, epochs: list[int]) -> None:
        """Delete segments."""
        await self._store.delete(owner_of(session_id), [_page(epoch) for epoch in epochs])

    async def header(self, session_id: str, epoch: int) -> SegmentHeader:
        """Read and check a segment's header.

        Raises:
            NotFoundError: There is no such segment.
            CorruptSegmentError: It fails a check, or is another session's.
        """
        header, _ = await self._begin(session_id, epoch)
        return header

    async def summary(self, session_id: str, epoch: int) -> tuple[SegmentHeader, bytes, bytes]:
        """Read and check a segment's header and its summary, which may be empty; raises as :meth:`header` does.

        Returns:
            The header, its bytes, and those of the summary.
        """
        header, data = await self._begin(session_id, epoch)
        start, size = header.summary.offset, header.summary.size
        summary = data[start : start + size]
        if len(summary) < size:
            summary += await self._read(session_id, epoch, start + len(summary), size - len(summary))
        check_section(header.summary, summary)
        return header, data[:start], summary

    async def _begin(self, session_id: str, epoch: int) -> tuple[SegmentHeader, bytes]:
        """Read what a segment begins with: its header, and as much behind it as comes along."""
        owner, page = owner_of(session_id), _page(epoch)
        data = await self._store.get_range(owner, page, 0, _FIRST_READ_BYTES)
        if not data:
            raise _missing(session_id, epoch)
        size = header_size(data[:START_BYTES])
        if size > len(data):
            data += await self._read(session_id, epoch, len(data), size - len(data))
        header = parse_header(data)
        said = qualified(header.identity.tenant, header.identity.session_id)
        if (said, header.epoch) != (session_id, epoch):
            raise CorruptSegmentError(f"segment {epoch} of session {session_id} is another one")
        return header, data

    @staticmethod
    def most_held(header: SegmentHeader) -> int:
        """Return the most bytes that :meth:`runs` holds of a segment at once."""
        return min(header.size, max([_READ_BYTES, *(section.size for section in header.sections)]))

    async def raw_header(self, session_id: str, epoch: int, header: SegmentHeader) -> bytes:
        """Read the bytes of a header that has been checked, and of the summary behind it."""
        return await self._read(session_id, epoch, 0, header.summary.offset + header.summary.size)

    async def runs(
        self, session_id: str, epoch: int, wanted: list[Section]
    ) -> AsyncGenerator[tuple[list[Section], bytes]]:
        """Read sections in the given order; those that follow one another in the segment come together, each checked.

        Raises:
            NotFoundError: The segment is gone.
            CorruptSegmentError: A section fails its check.
        """
        for run in _runs(wanted):
            data = await self._read(session_id, epoch, run[0].offset, sum(section.size for section in run))
            for section in run:
                check_section(section, part_of(run, data, section))
            yield run, data

    async def remove(self, name: str, *, held: bool = False) -> bool:
        """See :class:`Keeper`. A session's turn needs none of its segments."""
        del held
        await self.delete(name, list(await self.sizes(name)))
        return True

    async def measure(self, name: str) -> int:
        """See :class:`Keeper`. Every segment is of use alone, so an archive is never broken."""
        return sum((await self.sizes(name)).values())

    async def verify(self, name: str) -> int:
        """See :class:`Keeper`."""
        size = 0
        for epoch, stored in (await self.sizes(name)).items():
            try:
                header, _, _ = await self.summary(name, epoch)
                async with aclosing(self.runs(name, epoch, list(header.sections))) as runs:
                    async for _ in runs:
                        pass  # Each was checked before it came.
            except NotFoundError:
                continue  # Its time is over, or it was deleted.
            size += stored
        return size

    def named_by(self, owner: str, page: str) -> str | None:
        """See :class:`Keeper`."""
        return owner if page.startswith(_PAGE_PREFIX) else None

    async def dead(self, name: str, pages: Sequence[str]) -> list[str]:
        """See :class:`Keeper`. A segment gets its full time only together with its place on the list."""
        listed = {_page(epoch) for epoch in await self.sizes(name)}
        owner = owner_of(name)
        return [
            page for page in pages if page not in listed and await self._store.time_left(owner, page) > UNLISTED_SECONDS
        ]

    async def _read(self, session_id: str, epoch: int, start: int, size: int) -> bytes:
        if size == 0:
            return b""
        data = await self._store.get_range(owner_of(session_id), _page(epoch), start, size)
        if not data and await self._store.stat(owner_of(session_id), _page(epoch)) is None:
            raise _missing(session_id, epoch)
        if len(data) != size:
            raise CorruptSegmentError(f"segment {epoch} of session {session_id} is truncated")
        return data


def part_of(run: list[Section], data: bytes, section: Section) -> bytes:
    """Return the bytes of one section of a run."""
    start = section.offset - run[0].offset
    return data[start : start + section.size]


def _runs(sections: list[Section]) -> list[list[Section]]:
    """Group sections that follow one another in the segment, each group up to a number of bytes."""
    runs: list[list[Section]] = []
    size = 0
    for section in sections:
        previous = runs[-1][-1] if runs else None
        follows = previous is not None and previous.offset + previous.size == section.offset
        if follows and size + section.size <= _READ_BYTES:
            runs[-1].append(section)
            size += section.size
        else:
            runs.append([section])
            size = section.size
    return runs


def _page(epoch: int) -> str:
    return f"{_PAGE_PREFIX}{epoch}"


def _missing(session_id: str, epoch: int) -> NotFoundError:
    return NotFoundError("epochs", f"session {session_id!r} has no segment {epoch}, or its time is over")
