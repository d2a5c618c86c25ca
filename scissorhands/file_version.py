"""Seeing that files have changed, and reading them again."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from scissorhands.errors import ScissorhandsError

Read = TypeVar("Read")

# Files as they were: of each its inode, size and time of change; None of one that is not there.
FilesVersion = tuple[tuple[int, int, int] | None, ...]


def files_version(*paths: Path | None) -> FilesVersion:
    """Return what changes when one of the files does."""
    return tuple(_version(path) for path in paths)


def _version(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _ignore(told: object) -> None:
    del told


class Reread(Generic[Read]):
    """What was read from files, and is read again when one of them changes; for any number of threads.

    Args:
        read: Reads them, and raises a ScissorhandsError if they are of no use; then what they held before stays.
        paths: The files; None are left out.
        refused: Told of that, once a change.
        changed: Told of what was read again.

    Raises:
        ScissorhandsError: They are of no use at first.
    """

    def __init__(
        self,
        read: Callable[[], Read],
        *paths: Path | None,
        refused: Callable[[ScissorhandsError], object] = _ignore,
        changed: Callable[[Read], object] = _ignore,
    ) -> None:
        self._read, self._paths, self._refused, self._changed = read, paths, refused, changed
        self._lock = threading.Lock()
        self._seen = files_version(*paths)
        self._value = read()

    def value(self) -> Read:
        """Return what the files hold, or last held that was of use."""
        with self._lock:
            version = files_version(*self._paths)
            if version != self._seen:
                self._seen = version
                try:
                    self._value = self._read()
                except ScissorhandsError as error:
                    self._refused(error)
                else:
                    self._changed(self._value)
            return self._value
