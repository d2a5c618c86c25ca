"""The metrics of space: what is stored by kind, what goes and why, and what the janitor mends."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from scissorhands_server.manager.keeper import KINDS

EVICTION_REASONS = ("quota", "high_water", "broken")
# Pages that nothing names; entries of objects that are gone; objects without an entry; entries with wrong bytes.
JANITOR_RESULTS = ("dead_page", "gone_object", "found_object", "mended_entry")


class SpaceMetrics:
    """All series of space.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"scissorhands_manager_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"scissorhands_manager_{name}", text, labels, registry=registry)

        self.objects = gauge("stored_objects", "Objects in the store, by kind.", "kind")
        self.size = gauge("stored_bytes", "Bytes of the objects in the store, by kind.", "kind")
        self.evicted = counter("evicted_objects_total", "Objects deleted to make room, or broken.", "kind", "reason")
        self.evicted_bytes = counter("evicted_object_bytes_total", "Their bytes.", "kind", "reason")
        self.refusals = counter("quota_refusals_total", "Objects that found no room, by kind.", "kind")
        self.janitor = counter("janitor_mends_total", "What the janitor mended, by what it was.", "result")
        self.memory = gauge("store_memory_bytes", "Memory that the store takes, by its own account.")
        self.most_memory = gauge("store_most_memory_bytes", "The most that it may take; 0 if there is no bound.")
        for kind in KINDS:
            for family in (self.objects, self.size, self.refusals):
                family.labels(kind)
            for reason in EVICTION_REASONS:
                self.evicted.labels(kind, reason)
                self.evicted_bytes.labels(kind, reason)
        for result in JANITOR_RESULTS:
            self.janitor.labels(result)
