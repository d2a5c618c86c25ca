"""What lies in the store, as a manager tells it."""

from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration

from scissorhands.v1 import store_pb2
from scissorhands_client import channel


@dataclass(frozen=True)
class StoredObject:
    """An object in the store.

    Args:
        kind: What it is: row (of a suspended session), archive (a session's segments) or prefix.
        name: Its name among those of its kind; of rows and archives the id of their session.
        size_bytes: Its bytes.
        last_use_time: When it was used last, in UTC.
        expire_time: When its time to live ends, in UTC.
        pin_end_time: Until when it may not be evicted, in UTC; None if it may.
    """

    kind: str
    name: str
    size_bytes: int
    last_use_time: datetime
    expire_time: datetime
    pin_end_time: datetime | None


@dataclass(frozen=True)
class Resumable:
    """What the next turn of a session finds.

    Args:
        row: The session's row; None if it is gone.
        broken: Why the row was of no use, and was deleted; empty if it is whole.
    """

    row: StoredObject | None
    broken: str


@dataclass(frozen=True)
class StoredTotal:
    """What the objects of one tenant and kind come to.

    Args:
        tenant: The tenant.
        kind: The kind.
        objects: How many they are.
        size_bytes: Their bytes.
    """

    tenant: str
    kind: str
    objects: int
    size_bytes: int


@dataclass(frozen=True)
class StoreState:
    """What is stored, and what bounds it.

    Args:
        totals: By tenant and kind.
        quota_bytes: Most bytes of one tenant; None if there is no bound.
        high_bytes: Bytes of all tenants at which eviction begins; None if there is no bound.
        low_share: Share of a bound that eviction goes down to.
        used_memory_bytes: Memory that the store takes, by its own account.
        most_memory_bytes: The most that it may take; None if there is no bound.
        memory_policy: What it does then, as Redis names it; empty if the manager may not ask.
        key_hits: Keys that were looked up and found since the store started.
        key_misses: Keys that were looked up in vain since then.
        keys_evicted: Keys that the store has dropped by itself since then.
    """

    totals: tuple[StoredTotal, ...]
    quota_bytes: int | None
    high_bytes: int | None
    low_share: float
    used_memory_bytes: int
    most_memory_bytes: int | None
    memory_policy: str
    key_hits: int
    key_misses: int
    keys_evicted: int


@dataclass(frozen=True)
class GarbageItem:
    """One thing that was mended or evicted, or would be.

    Args:
        what: dead_page, broken, gone_object, found_object, mended_entry, quota or high_water.
        tenant: The tenant.
        kind: Kind of the object.
        name: Name of the object.
        page: Name of the page; empty for whole objects.
        size_bytes: Its bytes; of an entry the bytes that it was wrong by.
    """

    what: str
    tenant: str
    kind: str
    name: str
    page: str
    size_bytes: int


@dataclass(frozen=True)
class VerifiedObject:
    """An object that was read.

    Args:
        objects: About how many objects there are.
        tenant: The tenant.
        kind: Its kind.
        name: Its name.
        size_bytes: Bytes that were read; 0 if it was gone by then.
        error: What is wrong with it; empty if it is whole.
        deleted: Whether it was deleted.
    """

    objects: int
    tenant: str
    kind: str
    name: str
    size_bytes: int
    error: str
    deleted: bool


def verify_request(object_timeout: float, *, delete: bool) -> store_pb2.VerifyStoreRequest:
    """Return the request to check every object, each within so many seconds.

    Raises:
        InvalidRequestError: The time is out of range.
    """
    limit = Duration()
    limit.FromNanoseconds(round(channel.checked_timeout(object_timeout) * 1e9))
    return store_pb2.VerifyStoreRequest(delete_broken=delete, object_timeout=limit)


def read_object(message: store_pb2.StoredObject) -> StoredObject:
    """Read an object."""
    return StoredObject(
        kind=message.kind,
        name=message.name,
        size_bytes=message.size_bytes,
        last_use_time=message.last_use_time.ToDatetime(UTC),
        expire_time=message.expire_time.ToDatetime(UTC),
        pin_end_time=message.pin_end_time.ToDatetime(UTC) if message.pinned else None,
    )


def read_resumable(message: store_pb2.UnpauseSessionResponse) -> Resumable:
    """Read what the next turn of a session finds."""
    return Resumable(read_object(message.row) if message.HasField("row") else None, message.broken)


def read_store(message: store_pb2.GetStoreResponse) -> StoreState:
    """Read the state of a store."""
    return StoreState(
        totals=tuple(StoredTotal(each.tenant, each.kind, each.objects, each.size_bytes) for each in message.totals),
        quota_bytes=message.quota_bytes or None,
        high_bytes=message.high_bytes or None,
        low_share=message.low_share,
        used_memory_bytes=message.used_memory_bytes,
        most_memory_bytes=message.most_memory_bytes or None,
        memory_policy=message.memory_policy,
        key_hits=message.key_hits,
        key_misses=message.key_misses,
        keys_evicted=message.keys_evicted,
    )


def read_garbage(message: store_pb2.CollectGarbageResponse) -> GarbageItem:
    """Read one thing that was mended or evicted."""
    return GarbageItem(message.what, message.tenant, message.kind, message.name, message.page, message.size_bytes)


def read_verified(message: store_pb2.VerifyStoreResponse) -> VerifiedObject:
    """Read an object that was read."""
    return VerifiedObject(
        objects=message.objects,
        tenant=message.tenant,
        kind=message.kind,
        name=message.name,
        size_bytes=message.size_bytes,
        error=message.error,
        deleted=message.deleted,
    )
