"""Who runs: which request gets a row, who makes room for whom, and whose prompt is read next.

Pure bookkeeping, without a model or a lock.

- **Levels.** A request begins at the level of its priority and rises by one for every ``aging`` seconds since it came,
  up to the highest. So however many requests of a higher priority come, none waits for ever.
- **Admission** goes by level, then by arrival, and nobody passes the first: a large row does not starve behind small
  ones. It fits if there is a row for it, and room for its bytes.
- **Preemption** compares what was asked for, not age: a request whose *priority* is above the level at which another
  was admitted may take its place. So requests of one priority never preempt each other, and one that has waited for
  long, once it runs, is not put away again. One that could not be put away is asked again after a while.
- **Reading** goes by level, and within a level round robin, a chunk a turn: a short prompt waits for a chunk of each
  other, not for the whole of a long one, and a long one goes on however many short ones come.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Generic, Protocol, TypeVar

from scissorhands.errors import CapacityError, InvalidRequestError

# When a request that found the queue full should try again.
RETRY_SECONDS = 1.0
# How long a job that could not be put away is left alone: at first, then twice as long each time, at most.
FIRST_STAY_SECONDS, MOST_STAY_SECONDS = 0.25, 8.0


class Priority(IntEnum):
    """How urgent a request is; higher is more urgent."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class Job(Protocol):
    """What is scheduled. Jobs are told apart by identity."""

    @property
    def priority(self) -> Priority:
        """How urgent it is."""

    @property
    def arrived(self) -> float:
        """When it came, in seconds."""

    @property
    def row_bytes(self) -> int:
        """Bytes of its row."""

    @property
    def put_away(self) -> bool:
        """Whether it has run before, and its row was put away."""

    @property
    def prefilled(self) -> bool:
        """Whether its whole prompt has been read."""


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Limits:
    """What a worker has room for.

    Args:
        rows: Jobs that run at once.
        queue: Jobs that may wait, besides those that were put away.
        bytes: Bytes of the rows that run; 0 for no bound.
        aging: Seconds after which a job rises by one level.
    """

    rows: int
    queue: int
    bytes: int
    aging: float


@dataclass(frozen=True)
class Admission(Generic[J]):
    """Who gets a row next.

    Args:
        job: The job.
        victims: Those that must be put away first.
        lacks: What there is no room in without that: ``rows`` or ``bytes``; empty if there is room.
    """

    job: J
    victims: Sequence[J] = ()
    lacks: str = ""


@dataclass
class _Seat:
    """A job's place among those that run: at which level it came, when it last read, and for how long it stays."""

    level: int
    last_read: int
    stays_until: float = -math.inf
    stay: float = FIRST_STAY_SECONDS


class Scheduler(Generic[J]):
    """Keeps the jobs of an engine. Not safe for use by several threads.

    Args:
        limits: What there is room for.
        clock: Tells the time, in seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._waiting: list[J] = []
        self._seats: dict[J, _Seat] = {}
        self._row_bytes = 0
        self._reads = count()

    @property
    def waiting(self) -> Sequence[J]:
        """Jobs without a row, in no order."""
        return tuple(self._waiting)

    @property
    def running(self) -> Sequence[J]:
        """Jobs with a row, the first admitted first."""
        return tuple(self._seats)

    @property
    def busy(self) -> bool:
        """Whether there is anything to run."""
        return bool(self._waiting or self._seats)

    @property
    def more_rows(self) -> int:
        """How many more rows of the size that was last asked for could be held."""
        rows = self._limits.rows - len(self._seats)
        if self._limits.bytes and self._row_bytes:
            rows = min(rows, (self._limits.bytes - _bytes(self._seats)) // self._row_bytes)
        return max(0, rows)

    def check(self, priority: Priority, row_bytes: int = 0) -> None:
        """Make sure that there is a place for a job, running or waiting.

        Args:
            priority: Its priority.
            row_bytes: Bytes of its row; 0 if they are not known yet.

        Raises:
            InvalidRequestError: It can never have a row.
            CapacityError: The queue is full.
        """
        limits = self._limits
        if limits.bytes and row_bytes > limits.bytes:
            raise InvalidRequestError(
                "budget",
                f"comes to {row_bytes} bytes, and this worker holds {limits.bytes} in all: ask for a smaller one, or "
                "raise the worker's cache_bytes",
            )
        fitting = self._fitting()
        if len(fitting) == len(self._waiting) and self._fits([*self._seats, *fitting], row_bytes):
            return
        # Who was put away had a place once, and whoever can take another's place need not wait for one.
        beyond = sum(not job.put_away for job in self._waiting) - sum(not job.put_away for job in fitting)
        if beyond >= limits.queue + len(self._movable(priority)):
            rows = f"all {limits.rows} rows" if len(self._seats) >= limits.rows else "the memory for rows"
            raise CapacityError(f"{rows} and {limits.queue} places in the queue are taken", RETRY_SECONDS)

    def add(self, job: J) -> int:
        """Let a job wait, and return how many are ahead of it. Raises as :meth:`check` does."""
        self.check(job.priority, job.row_bytes)
        self._row_bytes = job.row_bytes
        own = self._order(job)
        ahead = sum(self._order(other) <= own for other in self._waiting) - len(self._fitting())
        self._waiting.append(job)
        return max(0, ahead)

    def next(self) -> Admission[J] | None:
        """Return who gets a row next; None if nobody can."""
        if not self._waiting:
            return None
        first = min(self._waiting, key=self._order)
        if self._fits(self._seats, first.row_bytes):
            return Admission(first)
        urgent = min(self._waiting, key=lambda job: (-job.priority, job.arrived))
        victims = self._victims(urgent)
        if not victims:
            return None
        return Admission(urgent, victims, "rows" if len(self._seats) >= self._limits.rows else "bytes")

    def admit(self, job: J) -> None:
        """Give a waiting job a row."""
        self._waiting.remove(job)
        self._seats[job] = _Seat(self._level(job), next(self._reads))

    def put_away(self, job: J) -> None:
        """Take the row of a running job, which waits again, at the level of its age."""
        del self._seats[job]
        self._waiting.append(job)

    def leave(self, job: J) -> None:
        """Do not propose to put a running job away for a while; each time for longer."""
        seat = self._seats[job]
        seat.stays_until = self._clock() + seat.stay
        seat.stay = min(2 * seat.stay, MOST_STAY_SECONDS)

    def remove(self, job: J) -> None:
        """Forget a job; one that is not known is no error."""
        if job in self._seats:
            del self._seats[job]
        elif job in self._waiting:
            self._waiting.remove(job)

    def reading(self) -> list[J]:
        """Return the running jobs whose prompts have not been read, the next to read first."""
        return sorted(
            (job for job in self._seats if not job.prefilled),
            key=lambda job: (-self._level(job), self._seats[job].last_read),
        )

    def has_read(self, job: J) -> None:
        """Take note that a chunk of a job's prompt was read."""
        if job in self._seats:
            self._seats[job].last_read = next(self._reads)

    def _level(self, job: J) -> int:
        aged = int((self._clock() - job.arrived) / self._limits.aging)
        return min(max(Priority), job.priority + aged)

    def _order(self, job: J) -> tuple[int, float]:
        return -self._level(job), job.arrived

    def _fits(self, seated: Collection[J], row_bytes: int) -> bool:
        """Whether a row finds room beside some others."""
        limits = self._limits
        return len(seated) < limits.rows and (not limits.bytes or _bytes(seated) + row_bytes <= limits.bytes)

    def _fitting(self) -> list[J]:
        """Return the waiting jobs that will have rows without anybody going."""
        fitting: list[J] = []
        if len(self._seats) < self._limits.rows:
            for job in sorted(self._waiting, key=self._order):
                if not self._fits([*self._seats, *fitting], job.row_bytes):
                    break
                fitting.append(job)
        return fitting

    def _movable(self, priority: Priority) -> list[J]:
        """Return the running jobs that a job of some priority may take the place of; the least loss first.

        That is the lowest level first, and within a level who came last.
        """
        now = self._clock()
        below = [job for job, seat in self._seats.items() if seat.level < priority and seat.stays_until <= now]
        return sorted(below, key=lambda job: (self._seats[job].level, -job.arrived))

    def _victims(self, job: J) -> list[J]:
        """Return whom to put away for a job that finds no room; nobody if all that may go are not enough."""
        staying, going = set(self._seats), []
        for other in self._movable(job.priority):
            staying.remove(other)
            going.append(other)
            if self._fits(staying, job.row_bytes):
                return going
        return []


def _bytes(jobs: Collection[Job]) -> int:
    return sum(job.row_bytes for job in jobs)
