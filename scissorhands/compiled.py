"""How functions are compiled for the processor at hand, by numba."""

from collections.abc import Callable
from typing import Any

from numba import njit

# Sums may be taken in the order that the processor likes.
FAST = {"reassoc", "nsz", "contract", "arcp", "afn"}


def compiled(function: Callable[..., Any], *, parallel: bool = False) -> Any:
    """Compile when called, and keep that on disk where numba finds a place to write; NUMBA_CACHE_DIR names one."""
    try:
        return njit(nogil=True, cache=True, parallel=parallel, fastmath=FAST, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, parallel=parallel, fastmath=FAST, error_model="numpy")(function)
