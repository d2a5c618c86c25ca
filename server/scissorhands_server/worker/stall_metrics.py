"""Metrics of the time that rows waited for plans."""

from prometheus_client import CollectorRegistry, Counter


class StallMetrics:
    """The series of stalls. They exist at zero from the start.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prefill = Counter(
            "scissorhands_worker_prefill_stall_seconds_total", "Time that prefill waited for plans.", registry=registry
        )
        self.decode = Counter(
            "scissorhands_worker_decode_stall_seconds_total",
            "Time that decoding waited for plans; it takes those that have come, so next to none.",
            registry=registry,
        )
