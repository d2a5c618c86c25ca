"""A circuit breaker around the store, so that a dead or stopped one stalls nobody.

The libraries at hand let every caller through once the cooldown is over, and each of them then waits for a deadline.
Here one call probes and the others go on failing at once.
"""

import time
from collections.abc import Awaitable, Callable

from scissorhands.errors import StoreUnavailableError
from scissorhands_server.store.base import PageStore
from scissorhands_server.store.decorator import Result, StoreDecorator

# Reasons that count. A store that refuses one call (out of memory, say) answers, and the next call may succeed.
TRIPPING = frozenset({"timeout", "unreachable"})
# Of a cluster: one node that is gone refuses its calls at once, and must not take the other nodes away.
CLUSTER_TRIPPING = frozenset({"timeout"})


class BreakerStore(StoreDecorator):
    """Refuses calls for a while after several have failed in a row, then lets a single one probe.

    Args:
        inner: The store.
        threshold: Failures in a row that open the circuit.
        cooldown: How long it stays open before a probe, in seconds.
        tripping: Reasons of failures that count.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        inner: PageStore,
        threshold: int = 2,
        cooldown: float = 1.0,
        tripping: frozenset[str] = TRIPPING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._tripping = tripping
        self._threshold = threshold
        self._cooldown = cooldown
        self._clock = clock
        self._failures = 0
        self._next_probe = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for a probe."""
        return self._failures >= self._threshold

    async def guard(self, method: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make the call unless the circuit is open.

        Raises:
            StoreUnavailableError: It is open, or the call failed.
        """
        probe = self.is_open
        if probe:
            self._admit_probe(method)
        try:
            result = await call()
        except StoreUnavailableError as error:
            self._settle(failed=error.reason in self._tripping)
            raise
        finally:
            # A cancelled call says nothing about the store, but the next one may probe.
            if probe:
                self._probing = False
        self._settle(failed=False)
        return result

    def _admit_probe(self, method: str) -> None:
        if self._probing or self._clock() < self._next_probe:
            raise StoreUnavailableError(f"{method} was not tried: the store does not answer", "open")
        self._probing = True

    def _settle(self, *, failed: bool) -> None:
        if not failed:
            self._failures = 0
            return
        self._failures += 1
        if self.is_open:
            self._next_probe = self._clock() + self._cooldown
