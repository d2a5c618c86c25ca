"""The memory that rows on their way to and from the store may take."""

import threading
from collections.abc import Callable


class Memory:
    """A bound on the bytes of rows on their way to and from the store. Safe for use by several threads.

    Args:
        bound: Most bytes.
        changed: Told how many are held, whenever that changes.
    """

    def __init__(self, bound: int, changed: Callable[[int], None]) -> None:
        self._bound = bound
        self._changed = changed
        self._held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Hold some bytes; False if there is no room for them."""
        with self._lock:
            if self._held + size > self._bound:
                return False
            self._held += size
            self._changed(self._held)
        return True

    def give_back(self, size: int) -> None:
        """Hold them no more."""
        with self._lock:
            self._held -= size
            self._changed(self._held)
