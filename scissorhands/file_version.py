"""Seeing that files have changed."""

from pathlib import Path

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
