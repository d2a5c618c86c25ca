"""The ledger: leases, retention, bounds and what is recorded of each session."""

import numpy as np
import pytest

from scissorhands.errors import CapacityError, InvalidRequestError, NotFoundError
from scissorhands.importance import Attention, Tally
from scissorhands.ledger import Ledger, LedgerLimits, SegmentRecord, SessionState
from scissorhands.v1 import budget_pb2, cache_manager_pb2


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return Ledger(LedgerLimits(sessions=3, lease=30, retention=600, attention_bytes=1000), clock)


def spec(session_id="a", prompt=10, grant=True):
    message = cache_manager_pb2.SessionSpec(session_id=session_id, prompt_tokens=prompt)
    if grant:
        message.grant.CopyFrom(budget_pb2.Grant(policy="h2o", layer_slots=[8]))
    return message


def tally(epoch=0, dropped=4):
    return Tally(epoch, 100, epoch + 1, dropped, 60, 2.5, 10.0)


def seen(size=100):
    return Attention(0, (np.zeros((1, size // 8), dtype=np.uint32),), (np.zeros((1, size // 8), dtype=np.float32),))


def segment(epoch=0, size=100, expires_at=1600.0):
    return SegmentRecord(epoch, 100, 16, size, expires_at)


def test_an_open_session_lives_as_long_as_its_lease_is_renewed(ledger, clock):
    record = ledger.open(spec())
    for _ in range(5):
        clock.now += 29
        assert ledger.renew(spec()) is record
        assert record.state is SessionState.OPEN
    clock.now += 30
    assert ledger.get("a").state is SessionState.EXPIRED


def test_a_later_turn_that_another_manager_opened_is_open_here(ledger):
    """It is heard of by its plans and renewals only."""
    first = spec()
    first.fence = 1
    ledger.close(ledger.open(first), discard=False)
    ledger.stored(ledger.get("a"), segment())
    later = spec()
    later.fence = 2
    record = ledger.renew(later)
    assert record.state is SessionState.OPEN
    assert set(record.segments) == {0}
    assert ledger.renew(first).spec.fence == 2
    ledger.close(record, discard=False)
    assert ledger.renew(later).state is SessionState.CLOSED


def test_an_expired_session_comes_back_with_its_next_call(ledger, clock):
    record = ledger.open(spec())
    ledger.evicted(record, tally())
    clock.now += 31
    assert ledger.get("a").state is SessionState.EXPIRED
    assert ledger.renew(spec()) is record
    assert record.state is SessionState.OPEN
    assert record.tally == tally()


def test_an_unknown_session_is_recreated_by_what_a_call_carries(ledger):
    assert ledger.find("a") is None
    assert ledger.renew(spec()).spec == spec()
    assert ledger.get("a").state is SessionState.OPEN


def test_a_closed_session_stays_closed_and_is_forgotten_after_a_while(ledger, clock):
    record = ledger.open(spec())
    ledger.close(record, discard=False)
    assert ledger.renew(spec()).state is SessionState.CLOSED
    ledger.close(record, discard=False)
    clock.now += 599
    assert ledger.get("a").state is SessionState.CLOSED
    clock.now += 1
    with pytest.raises(NotFoundError) as caught:
        ledger.get("a")
    assert caught.value.field == "session_id"


def test_the_time_of_an_expired_session_counts_from_the_end_of_its_lease(ledger, clock):
    ledger.open(spec())
    clock.now += 629
    assert ledger.find("a") is not None
    clock.now += 1
    assert ledger.find("a") is None


def test_opening_again_with_the_same_arguments_is_the_same_session(ledger, clock):
    record = ledger.open(spec())
    clock.now += 20
    assert ledger.opened(spec(grant=False)) is record
    assert record.lease_end == clock.now + 30
    assert ledger.opened(spec("b", grant=False)) is None


def test_an_id_is_not_given_away_twice(ledger):
    record = ledger.open(spec())
    with pytest.raises(InvalidRequestError, match="other arguments") as caught:
        ledger.opened(spec(prompt=11, grant=False))
    assert caught.value.field == "session.session_id"
    ledger.close(record, discard=False)
    with pytest.raises(InvalidRequestError, match="closed"):
        ledger.opened(spec(grant=False))


def test_a_full_ledger_forgets_the_session_that_ended_first(ledger, clock):
    records = [ledger.open(spec(name)) for name in "abc"]
    ledger.close(records[1], discard=False)
    clock.now += 1
    ledger.close(records[0], discard=False)
    ledger.open(spec("d"))
    assert ledger.find("b") is None
    assert ledger.find("a") is not None


def test_a_ledger_full_of_open_sessions_refuses(ledger, clock):
    for name in "abc":
        ledger.open(spec(name))
    with pytest.raises(CapacityError) as caught:
        ledger.open(spec("d"))
    assert caught.value.retry_after == 30
    with pytest.raises(CapacityError):
        ledger.renew(spec("d"))
    clock.now += 31
    ledger.open(spec("d"))
    assert len(ledger.page(None, None, 10)[0]) == 3


def test_a_repeated_or_late_plan_is_no_news(ledger):
    record = ledger.open(spec())
    assert ledger.evicted(record, tally(epoch=3))
    assert not ledger.evicted(record, tally(epoch=3, dropped=99))
    assert not ledger.evicted(record, tally(epoch=2, dropped=99))
    assert record.tally.evicted_slots == 4
    assert ledger.evicted(record, tally(epoch=5))


def test_segments_are_counted_until_their_time_is_over(ledger, clock):
    record = ledger.open(spec())
    ledger.stored(record, segment(0, 100, expires_at=1100))
    ledger.stored(record, segment(1, 50, expires_at=1200))
    ledger.stored(record, segment(1, 70, expires_at=1200))  # Sent again.
    assert (record.segment_bytes, ledger.segment_bytes) == (170, 170)
    clock.now = 1100
    ledger.sweep()
    assert list(record.segments) == [1]
    assert ledger.segment_bytes == 70
    ledger.deleted(record, [1, 2])
    assert (record.segment_bytes, ledger.segment_bytes) == (0, 0)


def test_a_session_is_remembered_as_long_as_it_has_segments(ledger, clock):
    record = ledger.open(spec())
    ledger.stored(record, segment(expires_at=2000))
    ledger.close(record, discard=False)
    clock.now = 1999
    assert ledger.find("a") is record
    clock.now = 2000
    assert ledger.find("a") is None
    assert ledger.segment_bytes == 0


def test_a_segment_of_a_forgotten_session_is_not_counted(ledger):
    records = [ledger.open(spec(name)) for name in "abc"]
    ledger.stored(records[0], segment())
    ledger.close(records[0], discard=False)
    ledger.open(spec("d"))
    assert ledger.segment_bytes == 0
    ledger.stored(records[0], segment())
    assert ledger.segment_bytes == 0


def test_discarded_sessions_wait_for_their_segments_to_go(ledger):
    record = ledger.open(spec())
    ledger.stored(record, segment())
    ledger.close(record, discard=False)
    assert ledger.to_discard() == []
    ledger.close(record, discard=True)
    assert ledger.to_discard() == [record]
    ledger.deleted(record, [0])
    assert ledger.to_discard() == []


def test_counts_are_of_sessions_that_hold_something(ledger, clock):
    assert ledger.counts() == dict.fromkeys(SessionState, 0)
    records = [ledger.open(spec(name)) for name in "abc"]
    ledger.stored(records[0], segment())
    assert ledger.counts()[SessionState.OPEN] == 3
    ledger.close(records[0], discard=False)
    ledger.close(records[1], discard=True)
    assert ledger.counts() == {SessionState.OPEN: 1, SessionState.CLOSED: 1, SessionState.EXPIRED: 0}
    ledger.deleted(records[0], [0])
    clock.now += 31
    ledger.sweep()
    assert ledger.counts() == dict.fromkeys(SessionState, 0)


def test_pages_run_from_the_newest_to_the_oldest(clock):
    ledger = Ledger(LedgerLimits(10, 30, 600, 0), clock)
    for name in "abcde":
        ledger.open(spec(name))
    ledger.close(ledger.get("d"), discard=False)
    page, more = ledger.page(None, None, 2)
    assert [record.session_id for record in page] == ["e", "d"]
    assert more
    page, more = ledger.page(None, page[-1].serial, 3)
    assert [record.session_id for record in page] == ["c", "b", "a"]
    assert not more
    page, more = ledger.page(SessionState.OPEN, None, 10)
    assert [record.session_id for record in page] == ["e", "c", "b", "a"]
    assert not more


def test_remembered_snapshots_are_bounded_and_the_oldest_goes_first(ledger):
    records = [ledger.open(spec(name)) for name in "abc"]
    first = seen(480)
    assert ledger.remember(records[0], first) is None
    assert ledger.remember(records[1], seen(480)) is None
    assert ledger.remember(records[0], first) is first  # Now that of "b" is the oldest.
    assert ledger.remember(records[2], seen(480)) is None
    assert ledger.remember(records[0], first) is first
    assert ledger.remember(records[1], seen(480)) is None  # It had been forgotten.


def test_a_snapshot_above_the_bound_is_not_remembered(ledger):
    record = ledger.open(spec())
    ledger.remember(record, seen(2000))
    assert ledger.remember(record, seen(100)) is None


def test_nothing_is_remembered_of_sessions_that_ended(ledger, clock):
    record = ledger.open(spec())
    ledger.remember(record, seen())
    ledger.close(record, discard=False)
    assert ledger.remember(record, seen()) is None
    assert ledger.remember(record, seen()) is None


def test_persistence_is_the_mean_over_all_pairs(ledger):
    record = ledger.open(spec())
    ledger.persisted(record, ())
    assert record.persistence == ()
    ledger.persisted(record, (0.5, 1.0))
    ledger.persisted(record, (1.0, 0.0))
    assert record.persistence == (0.75, 0.5)


def test_an_expired_session_with_segments_is_told_once(ledger, clock):
    record = ledger.open(spec())
    ledger.stored(record, segment(expires_at=2000))
    ledger.open(spec("b"))
    assert ledger.take_expired() == []
    clock.now += 30
    ledger.sweep()
    assert ledger.take_expired() == [record]
    assert ledger.take_expired() == []
    ledger.renew(spec())
    clock.now += 30
    ledger.sweep()
    ledger.deleted(record, [0])
    assert ledger.take_expired() == []


def test_an_adopted_session_is_expired_until_its_worker_calls(ledger):
    record = ledger.adopt("a")
    assert record.state is SessionState.EXPIRED
    assert ledger.renew(spec()) is record
    assert record.state is SessionState.OPEN
    assert record.spec == spec()
