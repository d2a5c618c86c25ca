"""What a worker and a manager are doing, from two looks at their metrics."""

from dataclasses import dataclass

from scissorhands_server.top.scrape import Scrape

_WORKER, _MANAGER = "scissorhands_worker_", "scissorhands_manager_"


@dataclass(frozen=True)
class WorkerState:
    """A worker. Rates are per second, between the two looks; what there was none of is None.

    Args:
        endpoint: Its metrics endpoint.
        model: Name of its model.
        rows: Requests that hold a row.
        rows_capacity: Requests that may.
        queued: Requests that wait.
        slots: Slots in use, over all rows, layers and KV heads.
        budget_slots: Slots granted.
        allocated_bytes: Bytes of the cache, evidence included.
        compression: How many times smaller that is than full caches in 16 bits; None while no row runs.
        generated: Tokens generated.
        read: Prompt tokens read.
        evictions: Plans applied.
        remote_share: Of those, the share that a manager computed.
        hit_share: Of the prompts and turns that looked in the store, the share that found something, since the start.
        manager_up: Whether a manager answers.
    """

    endpoint: str
    model: str
    rows: int
    rows_capacity: int
    queued: int
    slots: int
    budget_slots: int
    allocated_bytes: int
    compression: float | None
    generated: float
    read: float
    evictions: float
    remote_share: float | None
    hit_share: float | None
    manager_up: bool


@dataclass(frozen=True)
class ManagerState:
    """A manager. Rates are per second, between the two looks; what there was none of is None.

    Args:
        endpoint: Its metrics endpoint.
        sessions: Open sessions that it knows.
        plans: Plans computed.
        plan_seconds: Mean time of one.
        shed: Plans turned away.
        stored_objects: Objects in the store, of all managers.
        stored_bytes: Their bytes.
        store_memory_bytes: Memory of the store, by its own account.
        store_most_bytes: The most that it may take; 0 if there is no bound.
        store_up: Whether the store answers.
    """

    endpoint: str
    sessions: int
    plans: float
    plan_seconds: float | None
    shed: float
    stored_objects: int
    stored_bytes: int
    store_memory_bytes: int
    store_most_bytes: int
    store_up: bool


class Between:
    """What happened between two looks at an endpoint.

    Args:
        before: The first.
        now: The second.
        prefix: What its series begin with.
    """

    def __init__(self, before: Scrape, now: Scrape, prefix: str) -> None:
        self._before = before
        self._now = now
        self._prefix = prefix

    def value(self, name: str, **labels: str) -> float:
        """Return what a gauge says now, or a counter has come to."""
        return self._now.total(self._prefix + name, **labels)

    def label(self, name: str, label: str) -> str:
        """Return a label of any series of a name."""
        return self._now.label(self._prefix + name, label)

    def grown(self, name: str, **labels: str) -> float:
        """Return by how much a counter grew; one that fell began anew."""
        now, before = self.value(name, **labels), self._before.total(self._prefix + name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float:
        """Return by how much a counter grew per second."""
        seconds = self._now.at - self._before.at
        return self.grown(name, **labels) / seconds if seconds > 0 else 0.0


def worker_state(endpoint: str, before: Scrape, now: Scrape) -> WorkerState:
    """Tell what a worker is doing."""
    seen = Between(before, now, _WORKER)
    allocated = seen.value("cache_allocated_bytes")
    found = seen.value("prefix_lookups_total", result="hit") + seen.value("resumes_total", result="resumed")
    return WorkerState(
        endpoint=endpoint,
        model=seen.label("requests_total", "model_name"),
        rows=int(seen.value("rows")),
        rows_capacity=int(seen.value("rows_capacity")),
        queued=int(seen.value("queue_requests")),
        slots=int(seen.value("cache_slots")),
        budget_slots=int(seen.value("cache_budget_slots")),
        allocated_bytes=int(allocated),
        compression=_share(seen.value("cache_full_16bit_bytes"), allocated),
        generated=seen.rate("generated_tokens_total"),
        read=seen.rate("prompt_tokens_total"),
        evictions=seen.rate("evictions_total"),
        remote_share=_share(seen.grown("plans_total", source="manager"), seen.grown("plans_total")),
        hit_share=_share(found, seen.value("prefix_lookups_total") + seen.value("resumes_total")),
        manager_up=seen.value("manager_up") > 0,
    )


def manager_state(endpoint: str, before: Scrape, now: Scrape) -> ManagerState:
    """Tell what a manager is doing."""
    seen = Between(before, now, _MANAGER)
    return ManagerState(
        endpoint=endpoint,
        sessions=int(seen.value("sessions", state="open")),
        plans=seen.rate("plans_total", result="computed"),
        plan_seconds=_share(seen.grown("plan_compute_seconds_sum"), seen.grown("plan_compute_seconds_count")),
        shed=seen.rate("plans_shed_total"),
        stored_objects=int(seen.value("stored_objects")),
        stored_bytes=int(seen.value("stored_bytes")),
        store_memory_bytes=int(seen.value("store_memory_bytes")),
        store_most_bytes=int(seen.value("store_most_memory_bytes")),
        store_up=seen.value("store_up") > 0,
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
