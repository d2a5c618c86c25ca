"""A bound on what calls in progress may hold together: how many they are, and how much memory they take."""

from scissorhands.errors import CapacityError


class Admission:
    """Lets calls in until a bound is met; the next one is turned away at once instead of waiting.

    Args:
        what: What is admitted, for the error.
        most: Most calls at once.
        most_bytes: Most bytes that they may hold together.
        retry_after: When a call that was turned away may try again, in seconds.
    """

    def __init__(self, what: str, most: int, most_bytes: int, retry_after: float) -> None:
        self._what = what
        self._most = most
        self._most_bytes = most_bytes
        self._retry_after = retry_after
        self.count = 0
        self.bytes = 0

    def admit(self, size: int) -> "Ticket":
        """Let one call of ``size`` bytes in; it holds them until its ticket is released.

        Raises:
            CapacityError: A bound is met.
        """
        if self.count >= self._most:
            raise CapacityError(f"{self._most} {self._what} are in progress, the most", self._retry_after)
        if self.bytes + size > self._most_bytes:
            raise CapacityError(
                f"the {self._what} in progress hold {self.bytes} of {self._most_bytes} bytes; no room for {size}",
                self._retry_after,
            )
        self.count += 1
        self.bytes += size
        return Ticket(self, size)


class Ticket:
    """The right to hold some bytes. Whoever holds it releases it, once, when the memory is free again."""

    def __init__(self, admission: Admission, size: int) -> None:
        self._admission: Admission | None = admission
        self._size = size

    def release(self) -> None:
        """Give the bytes back; doing so twice is not an error."""
        if self._admission is not None:
            self._admission.count -= 1
            self._admission.bytes -= self._size
            self._admission = None
