"""The metrics of rows that make room for more urgent requests."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREEMPTION_RESULTS = ("put_away", "no_memory", "coming", "failed")
PREEMPTION_REASONS = ("rows", "bytes")

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ParkingMetrics:
    """Rows that are put away and brought back.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.preemptions = Counter(
            "scissorhands_worker_preemptions_total",
            "Times that rows should make room for a more urgent request, by whether they did, and by what there was "
            "not enough of. One that did not is asked again after a while.",
            ("result", "reason"),
            registry=registry,
        )
        self.parked = Gauge("scissorhands_worker_preempted_rows", "Rows that are put away now.", registry=registry)
        self.away = Histogram(
            "scissorhands_worker_preempted_seconds",
            "From putting a row away to going on with it, or to its end.",
            buckets=_SECONDS,
            registry=registry,
        )
        for result in PREEMPTION_RESULTS:
            for reason in PREEMPTION_REASONS:
                self.preemptions.labels(result, reason)
