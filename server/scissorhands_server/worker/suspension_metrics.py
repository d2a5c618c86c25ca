"""The metrics of sessions that are kept between their turns."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# What becomes of a row on its way, beside resumed and suspended.
MISSES = (
    "conflict",
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
RESUME_RESULTS = ("resumed", "new", "tokens", "budget", *MISSES)
SUSPEND_RESULTS = ("suspended", *MISSES)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class SuspensionMetrics:
    """Rows that come from the store, and rows that go there.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"scissorhands_worker_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"scissorhands_worker_{name}", text, buckets=_SECONDS, registry=registry)

        self.resumes = counter(
            "resumes_total", "Turns of sessions that are kept, by whether their row was resumed or why not.", "result"
        )
        self.suspends = counter("suspends_total", "Rows kept for a next turn, by what became of them.", "result")
        self.resumed_tokens = counter("resumed_tokens_total", "Prompt tokens that were resumed instead of read.")
        self.resume_bytes = counter("resume_bytes_total", "Bytes of rows that came from the store.")
        self.suspend_bytes = counter("suspend_bytes_total", "Bytes of rows that went to the store.")
        self.resume_time = histogram("resume_seconds", "From asking for a row to having it, or to knowing that not.")
        self.suspend_time = histogram("suspend_seconds", "From the end of an answer to its row being in the store.")
        self.held = Gauge(
            "scissorhands_worker_suspension_held_bytes",
            "Bytes of rows on their way to and from the store, or put away for more urgent requests.",
            registry=registry,
        )
        for result in RESUME_RESULTS:
            self.resumes.labels(result)
        for result in SUSPEND_RESULTS:
            self.suspends.labels(result)
