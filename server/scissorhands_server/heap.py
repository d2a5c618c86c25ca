"""The C library's heap: blocks of megabytes are kept for the next of their kind.

glibc gives freed memory back as soon as some megabytes are free, so every part of a row, and every intermediate result
of a chunk, begins with a page fault for each of its 4 KiB. ``python -m benchmarks.heap`` measures what keeping
it brings.
"""

import ctypes
import sys

# Names of mallopt(3), which has no header for Python.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The most that glibc takes. Larger blocks, such as a row's keys of one layer, are mapped as before.
_LARGEST_BYTES = 32 << 20
# Freed memory at the end of the heap beyond which it is given back.
_KEPT_BYTES = 128 << 20


def keep_large_blocks() -> bool:
    """Let the heap keep large blocks, at most 128 MiB of them free; False where the C library cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # Not glibc.
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
