"""The queue of plans: bounded by how many wait and for how long, emptied worker by worker, computed off the loop."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from scissorhands.errors import CapacityError
from scissorhands_server.manager.admission import Admission, Ticket

Job = TypeVar("Job")
Done = TypeVar("Done")

# When to try again at the soonest, in seconds.
RETRY_AFTER_SECONDS = 0.1
# Of the time that plans take, how much of the mean the latest is.
_LATEST = 0.1

SHED_REASONS = ("bound", "wait")


class PlanGate:
    """Turns snapshots away at once that would wait for too long, or for which there is no room.

    Args:
        most: Most snapshots in progress.
        most_bytes: Most bytes that they may take.
        most_wait: The longest that one may have to wait, as far as the plans before it tell, in seconds.
        threads: Plans that are computed at once.
        shed: Told why one is turned away, one of :data:`SHED_REASONS`.
    """

    def __init__(self, most: int, most_bytes: int, most_wait: float, threads: int, shed: Callable[[str], None]) -> None:
        self._admission = Admission("plans", most, most_bytes, RETRY_AFTER_SECONDS)
        self._most_wait = most_wait
        self._threads = threads
        self._shed = shed
        # Seconds that a byte of a snapshot took of late: large snapshots take longer than small ones.
        self._pace = 0.0

    @property
    def expected_wait(self) -> float:
        """How long the next snapshot would wait for those in progress, in seconds."""
        return self._admission.bytes * self._pace / self._threads

    def admit(self, size: int) -> Ticket:
        """Let a snapshot of ``size`` bytes in.

        Raises:
            CapacityError: It would wait for too long, or a bound is met.
        """
        wait = self.expected_wait
        if wait > self._most_wait:
            self._shed("wait")
            raise CapacityError(
                f"a plan would have to wait for {wait:.3g} s, above the {self._most_wait:g} s of max_plan_wait",
                max(RETRY_AFTER_SECONDS, wait - self._most_wait),
            )
        try:
            return self._admission.admit(size)
        except CapacityError:
            self._shed("bound")
            raise

    def took(self, size: int, seconds: float) -> None:
        """Learn how long snapshots of ``size`` bytes in all took to plan."""
        pace = seconds / size
        self._pace += (pace - self._pace) * (_LATEST if self._pace else 1)


@dataclass
class _Waiting(Generic[Job, Done]):
    jobs: Sequence[Job]
    tickets: Sequence[Ticket]
    done: "asyncio.Future[list[Done]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PlanQueue(Generic[Job, Done]):
    """Computes jobs in threads, those of one call together. Callers take turns by their key, so none starves another.

    What waits is bounded by the tickets that its callers hold.

    Args:
        compute: Computes one job; must not raise.
        threads: Jobs computed at once.
    """

    def __init__(self, compute: Callable[[Job], Done], threads: int) -> None:
        self._compute = compute
        self._threads = threads
        self._running = 0
        self._waiting: OrderedDict[str, deque[_Waiting[Job, Done]]] = OrderedDict()
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="plan")

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    async def run(self, key: str, jobs: Sequence[Job], tickets: Sequence[Ticket]) -> list[Done]:
        """Compute some jobs, in order.

        Args:
            key: Who asks.
            jobs: The jobs.
            tickets: What they hold; released when nothing is held any more, whoever has left.
        """
        waiting: _Waiting[Job, Done] = _Waiting(jobs, tickets)
        self._waiting.setdefault(key, deque()).append(waiting)
        self._start()
        try:
            # A thread cannot be stopped: what it works on stays in memory until it is done.
            return await asyncio.shield(waiting.done)
        except asyncio.CancelledError:
            if waiting in self._waiting.get(key, ()):
                self._waiting[key].remove(waiting)
                if not self._waiting[key]:
                    del self._waiting[key]
                _release(tickets)
            raise

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> None:
        while self._running < self._threads and self._waiting:
            key, waiting = self._waiting.popitem(last=False)
            first = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting
            self._running += 1
            future = asyncio.get_running_loop().run_in_executor(self.pool, self._compute_all, first.jobs)
            future.add_done_callback(partial(self._ended, first))

    def _compute_all(self, jobs: Sequence[Job]) -> list[Done]:
        return [self._compute(job) for job in jobs]

    def _ended(self, waiting: _Waiting[Job, Done], ended: "asyncio.Future[list[Done]]") -> None:
        self._running -= 1
        _release(waiting.tickets)
        if ended.cancelled():
            waiting.done.cancel()
            return
        if (error := ended.exception()) is not None:
            waiting.done.set_exception(error)
            waiting.done.exception()  # Looked at, so that nobody is told of it when the caller has left.
        else:
            waiting.done.set_result(ended.result())
        self._start()


def _release(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.release()
