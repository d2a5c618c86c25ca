"""The metrics of prefixes that requests share."""

from prometheus_client import CollectorRegistry, Counter, Histogram

FAILURES = (
    "corrupt",
    "failed",
    "late",
    "manager_unavailable",
    "mismatch",
    "missing",
    "no_room",
    "quota",
    "store_full",
    "store_unavailable",
)
# What becomes of asking for a prefix: used, or why the prompt is read. new: nothing of it is stored; slower: reading is
# faster than loading, as far as is known.
LOOKUP_RESULTS = ("hit", "new", "slower", *FAILURES)
# What becomes of a boundary that a row has passed. known: it had been stored meanwhile.
STORE_RESULTS = ("stored", "known", *FAILURES)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class PrefixMetrics:
    """Prefixes that come from the store, and boundaries that go there.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"scissorhands_worker_prefix_{name}", text, labels, registry=registry)

        self.lookups = counter("lookups_total", "Prompts whose prefix was asked for, by what became of it.", "result")
        self.stores = counter("stores_total", "Boundaries of prompts to store, by what became of them.", "result")
        self.tokens = counter("tokens_total", "Prompt tokens that were not read, because their prefix was stored.")
        self.load_bytes = counter("load_bytes_total", "Bytes of prefixes that came from the store.")
        self.store_bytes = counter("store_bytes_total", "Bytes of prefixes that went to the store.")
        self.saved = counter(
            "saved_seconds_total", "Time that reading those tokens would have taken, less that of loading them."
        )
        self.lookup_time = Histogram(
            "scissorhands_worker_prefix_lookup_seconds",
            "From asking for a prefix to having it, or to knowing that not.",
            buckets=_SECONDS,
            registry=registry,
        )
        for result in LOOKUP_RESULTS:
            self.lookups.labels(result)
        for result in STORE_RESULTS:
            self.stores.labels(result)
