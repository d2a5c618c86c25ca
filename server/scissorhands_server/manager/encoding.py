"""From the ledger's records to the protocol's messages."""

from google.protobuf.timestamp_pb2 import Timestamp

from scissorhands.demand import Demand
from scissorhands.errors import InvalidRequestError
from scissorhands.ledger import SessionRecord, SessionState
from scissorhands.v1 import cache_manager_pb2
from scissorhands.wire import profile_message

_STATES = {
    SessionState.OPEN: cache_manager_pb2.SESSION_STATE_OPEN,
    SessionState.CLOSED: cache_manager_pb2.SESSION_STATE_CLOSED,
    SessionState.EXPIRED: cache_manager_pb2.SESSION_STATE_EXPIRED,
}
_NUMBERS: dict[int, SessionState] = {number: state for state, number in _STATES.items()}


def read_state(number: int) -> SessionState | None:
    """Read a state to filter by; unspecified is None.

    Raises:
        InvalidRequestError: There is no such state.
    """
    if number == cache_manager_pb2.SESSION_STATE_UNSPECIFIED:
        return None
    if number not in _NUMBERS:
        raise InvalidRequestError("state", f"must be one of {', '.join(cache_manager_pb2.SessionState.keys())}")
    return _NUMBERS[number]


def session_message(record: SessionRecord, wall_offset: float, *, segments: bool) -> cache_manager_pb2.Session:
    """Write a session.

    Args:
        record: The ledger's record of it.
        wall_offset: What to add to the ledger's clock to get seconds since 1970.
        segments: Whether to list its segments.
    """
    message = cache_manager_pb2.Session(
        spec=record.spec,
        state=_STATES[record.state],
        open_time=_timestamp(record.opened_at + wall_offset),
        lease_end_time=_timestamp(record.lease_end + wall_offset),
        persistence=record.persistence,
        segment_count=len(record.segments),
        segment_bytes=record.segment_bytes,
        quality=record.quality,
    )
    if record.tally is not None:
        message.evictions = record.tally.evictions
        message.evicted_slots = record.tally.evicted_slots
        message.resident_slots = record.tally.resident_slots
        message.step = record.tally.step
        message.mass_dropped = record.tally.mass_dropped_share
    if segments:
        for _, segment in sorted(record.segments.items()):
            message.segments.add(epoch=segment.epoch, step=segment.step, slots=segment.slots, size_bytes=segment.size)
    return message


def measured_message(known: Demand) -> cache_manager_pb2.GetMeasuredProfileResponse:
    """Write what was measured of a model."""
    return cache_manager_pb2.GetMeasuredProfileResponse(
        profile=profile_message(known.profile) if known.profile else None,
        model_name=known.name,
        layers=known.shape.layers,
        kv_heads=known.shape.kv_heads,
        pairs=known.pairs,
    )


def _timestamp(seconds: float) -> Timestamp:
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
