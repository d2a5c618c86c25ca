"""The metrics of recall."""

from prometheus_client import CollectorRegistry, Counter, Histogram

# Why segments could not be recalled; late and what follows: nothing could.
MISSES = (
    "absent",
    "corrupt",
    "dropped",
    "mismatch",
    "no_summary",
    "failed",
    "late",
    "manager_unavailable",
    "no_room",
    "quota",
    "store_full",
    "store_unavailable",
)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class RecallMetrics:
    """Evicted slots that come back.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"scissorhands_worker_{name}", text, labels, registry=registry)

        self.recalls = counter("recalls_total", "Times that rows asked for evicted slots, by what came.", "result")
        self.misses = counter("recall_misses_total", "Segments that could not be recalled, by reason.", "reason")
        self.slots = counter("recalled_slots_total", "Slots recalled, over all layers and KV heads.")
        self.sections = counter("recalled_sections_total", "Sections that recalled slots were chosen from.")
        self.bytes = counter("recall_bytes_total", "Bytes of those sections.")
        self.time = Histogram(
            "scissorhands_worker_recall_seconds",
            "From asking for evicted slots to having them in their places, or to knowing that not.",
            buckets=_SECONDS,
            registry=registry,
        )
        for result in ("recalled", "nothing", "missed"):
            self.recalls.labels(result)
        for reason in MISSES:
            self.misses.labels(reason)
