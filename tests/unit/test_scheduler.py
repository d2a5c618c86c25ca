"""Who gets a row, who makes room, and whose prompt is read next; without a model."""

import random
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest

from scissorhands.errors import CapacityError, InvalidRequestError
from scissorhands_server.worker.scheduler import (
    FIRST_STAY_SECONDS,
    MOST_STAY_SECONDS,
    Admission,
    Limits,
    Priority,
    Scheduler,
)

LOW, NORMAL, HIGH = Priority
AGING = 10.0


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Job:
    """A request without a model."""

    priority: Priority = NORMAL
    row_bytes: int = 1
    arrived: float = 0.0
    put_away: bool = False
    prefilled: bool = False
    name: int = field(default_factory=count().__next__)


def scheduler(clock: Clock, *, rows: int = 2, queue: int = 8, size: int = 0) -> Scheduler[Job]:
    return Scheduler(Limits(rows, queue, size, AGING), clock)


def run(of: Scheduler[Job]) -> list[Job]:
    """Admit who can be, as an engine does; return whom."""
    admitted = []
    while (admission := of.next()) is not None:
        for victim in admission.victims:
            of.put_away(victim)
            victim.put_away = True
        of.admit(admission.job)
        admission.job.put_away = False
        admitted.append(admission.job)
    return admitted


def test_equal_requests_run_in_the_order_they_came():
    clock = Clock()
    own = scheduler(clock)
    jobs = [Job(arrived=at) for at in range(5)]
    assert [own.add(job) for job in jobs] == [0, 0, 0, 1, 2]
    assert run(own) == jobs[:2]
    assert run(own) == []
    own.remove(jobs[0])
    assert run(own) == [jobs[2]]
    assert own.running == (jobs[1], jobs[2])
    assert set(own.waiting) == {jobs[3], jobs[4]}


def test_the_queue_is_bounded():
    own = scheduler(Clock(), rows=2, queue=1)
    for _ in range(3):
        own.add(Job())
    with pytest.raises(CapacityError, match="1 places"):
        own.check(NORMAL)
    run(own)
    with pytest.raises(CapacityError, match="all 2 rows"):
        own.add(Job())
    own.remove(own.running[0])
    own.check(NORMAL)


def test_a_queue_of_none_still_lets_free_rows_be_taken():
    own = scheduler(Clock(), rows=1, queue=0)
    own.add(Job())
    with pytest.raises(CapacityError):
        own.add(Job())


def test_the_urgent_come_first_and_age_counts_in_the_end():
    clock = Clock()
    own = scheduler(clock, rows=1, queue=100)
    old = Job(LOW)
    own.add(old)
    waited = 0
    for second in range(100):
        # A new urgent request every second, each of which runs for a second.
        clock.now = second
        own.add(Job(HIGH, arrived=second))
        [running] = run(own)
        if running is old:
            waited = second
            break
        own.remove(running)
    # Two levels up it is as urgent as they are, and came before them.
    assert waited == 2 * AGING


def test_nobody_passes_a_large_row_that_is_first():
    own = scheduler(Clock(), rows=9, size=10)
    first, large, small = Job(row_bytes=6), Job(row_bytes=5, arrived=1), Job(row_bytes=1, arrived=2)
    for job in (first, large, small):
        own.add(job)
    assert run(own) == [first]
    own.remove(first)
    assert run(own) == [large, small]


def test_bytes_are_filled_and_what_more_there_is_room_for_is_told():
    own = scheduler(Clock(), rows=50, queue=100, size=100)
    assert own.more_rows == 50
    for at in range(20):
        own.add(Job(row_bytes=12, arrived=at))
    assert own.more_rows == 8
    assert len(run(own)) == 8
    assert own.more_rows == 0
    for job in own.running[:3]:
        own.remove(job)
    assert own.more_rows == 3


def test_a_row_that_can_never_fit_is_refused_by_name():
    own = scheduler(Clock(), rows=50, size=100)
    own.check(NORMAL, 100)
    with pytest.raises(InvalidRequestError, match=r"101 bytes.*100 in all.*cache_bytes") as caught:
        own.add(Job(row_bytes=101))
    assert caught.value.field == "budget"


def test_a_more_urgent_request_takes_the_place_of_the_lowest_and_newest():
    clock = Clock()
    own = scheduler(clock, rows=3)
    normal, older, newer = Job(NORMAL), Job(LOW, arrived=1), Job(LOW, arrived=2)
    for job in (normal, older, newer):
        own.add(job)
    run(own)
    urgent = Job(HIGH, arrived=3)
    own.add(urgent)
    admission = own.next()
    assert admission is not None
    assert (admission.job, list(admission.victims), admission.lacks) == (urgent, [newer], "rows")
    assert run(own) == [urgent]
    own.remove(urgent)
    assert run(own) == [newer]


def test_as_many_make_room_as_it_takes_and_none_in_vain():
    own = scheduler(Clock(), rows=9, size=10)
    jobs = [Job(LOW, row_bytes=3), Job(LOW, row_bytes=3, arrived=1), Job(HIGH, row_bytes=4, arrived=2)]
    for job in jobs:
        own.add(job)
    run(own)
    own.add(Job(NORMAL, row_bytes=7, arrived=3))
    assert own.next() is None
    fits = Job(NORMAL, row_bytes=5, arrived=4)
    own.add(fits)
    # The first in line cannot make room for itself and is passed by nobody.
    assert own.next() is None
    own.remove(next(job for job in own.waiting if job is not fits))
    admission = own.next()
    assert admission is not None
    assert (admission.victims, admission.lacks) == ([jobs[1], jobs[0]], "bytes")


def test_equals_never_preempt_each_other_however_long_they_wait():
    clock = Clock()
    own = scheduler(clock, rows=1)
    own.add(Job(NORMAL))
    run(own)
    own.add(Job(NORMAL, arrived=1))
    own.add(Job(LOW, arrived=0))
    clock.now = 100 * AGING
    assert own.next() is None


def test_who_was_admitted_by_age_stays():
    clock = Clock()
    own = scheduler(clock, rows=1)
    old = Job(LOW)
    own.add(old)
    clock.now = 2 * AGING
    run(own)
    own.add(Job(HIGH, arrived=clock.now))
    assert own.next() is None


def test_who_cannot_be_put_away_is_left_alone_for_a_while():
    clock = Clock()
    own = scheduler(clock, rows=2)
    jobs = [Job(LOW), Job(LOW, arrived=1)]
    for job in jobs:
        own.add(job)
    run(own)
    own.add(Job(HIGH, arrived=2))
    own.leave(jobs[1])
    admission = own.next()
    assert admission is not None
    assert admission.victims == [jobs[0]]
    own.leave(jobs[0])
    assert own.next() is None
    clock.now = FIRST_STAY_SECONDS
    assert own.next() == Admission(admission.job, [jobs[1]], "rows")


def test_who_is_refused_again_and_again_is_asked_more_and_more_seldom():
    clock = Clock()
    own = scheduler(clock, rows=1)
    job = Job(LOW)
    own.add(job)
    run(own)
    own.add(Job(HIGH))
    asked = []
    while clock.now < 60:
        if own.next() is not None:
            asked.append(clock.now)
            own.leave(job)
        clock.now += FIRST_STAY_SECONDS
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[:5] == [FIRST_STAY_SECONDS * 2**times for times in range(5)]
    assert max(pauses) == pauses[-1] == MOST_STAY_SECONDS


def test_a_full_queue_takes_as_many_urgent_ones_as_can_take_a_place():
    own = scheduler(Clock(), rows=1, queue=0)
    own.add(Job(LOW))
    run(own)
    with pytest.raises(CapacityError):
        own.check(LOW)
    own.add(Job(HIGH, arrived=1))
    with pytest.raises(CapacityError):
        own.add(Job(HIGH, arrived=2))
    run(own)
    # Who was put away takes nobody's place in the queue.
    with pytest.raises(CapacityError):
        own.check(HIGH)
    own.remove(own.running[0])
    run(own)
    assert not own.waiting


def test_prompts_are_read_in_turn_and_a_short_one_is_done_soon():
    clock = Clock()
    own = scheduler(clock, rows=4)
    left = {Job(arrived=0): 50, Job(arrived=1): 40, Job(arrived=2): 2}
    short = next(job for job, chunks in left.items() if chunks == 2)
    for job in left:
        own.add(job)
    run(own)
    chunks = 0
    while not short.prefilled:
        chunks += 1
        job = own.reading()[0]
        left[job] -= 1
        own.has_read(job)
        job.prefilled = not left[job]
    assert chunks == 2 * 3
    assert sorted(left.values()) == [0, 38, 48]


def test_prompts_of_more_urgent_requests_are_read_first_until_age_counts():
    clock = Clock()
    own = scheduler(clock, rows=4)
    low, high = Job(LOW), Job(HIGH)
    for job in (low, high):
        own.add(job)
    run(own)
    for _ in range(3):
        assert own.reading() == [high, low]
        own.has_read(high)
    clock.now = 2 * AGING
    assert own.reading() == [low, high]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_the_bounds_hold_and_everybody_runs(seed):
    rng = random.Random(seed)
    clock = Clock()
    own = scheduler(clock, rows=5, queue=20, size=40)
    left: dict[Job, int] = {}
    done = 0
    asked = 0
    for step in range(2000):
        clock.now = step
        if step < 1200 and rng.random() < 0.5:
            job = Job(rng.choice(list(Priority)), rng.randint(1, 25), step)
            try:
                own.add(job)
            except CapacityError:
                continue
            left[job] = rng.randint(1, 12)
            asked += 1
        run(own)
        assert len(own.running) <= 5
        assert sum(job.row_bytes for job in own.running) <= 40
        assert sum(not job.put_away for job in own.waiting) <= 20 + 5
        for job in own.running:
            left[job] -= 1
            if not left[job]:
                own.remove(job)
                done += 1
    assert done == asked > 100
    assert not own.busy
