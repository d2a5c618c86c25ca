"""The worker's metrics. Every series exists at zero from the start; labels come from small closed sets."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scissorhands.policies import POLICIES
from scissorhands.row import Phase, PlanSource
from scissorhands_server.worker.parking_metrics import ParkingMetrics
from scissorhands_server.worker.prefix_metrics import PrefixMetrics
from scissorhands_server.worker.quality import ShadowResult
from scissorhands_server.worker.recall_metrics import RecallMetrics
from scissorhands_server.worker.stall_metrics import StallMetrics
from scissorhands_server.worker.suspension_metrics import SuspensionMetrics

RESULTS = ("eos", "stop", "length", "cancelled", "refused", "overloaded", "error")
SEGMENT_RESULTS = ("offloaded", "dropped")
MANAGER_ERRORS = ("unavailable", "deadline", "refused", "other")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SMALL_SHARES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_OVERLAPS = (0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1)


class WorkerMetrics:
    """All series of one worker.

    Args:
        registry: Where they are registered.
        model_name: Name of the served model.
        rows: Requests that decode at once.
        queue: Requests that may wait.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, rows: int, queue: int) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"scissorhands_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"scissorhands_worker_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"scissorhands_worker_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests_total", "Requests that ended, by how.", "model_name", "result")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens read.")
        self.generated_tokens = counter("generated_tokens_total", "Tokens generated.")
        self.queued = gauge("queue_requests", "Requests that wait for a row.")
        self.queue_capacity = gauge("queue_capacity_requests", "Requests that may wait for a row.")
        self.rows = gauge("rows", "Requests that hold a row.")
        self.rows_capacity = gauge("rows_capacity", "Requests that may hold a row.")
        self.more_rows = gauge("more_rows", "More rows, of the size last asked for, that could be held.")
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From one token to the next of a request.")
        self.queue_time = histogram("queue_time_seconds", "From arrival to the start of prefill.")
        self.cache_slots = gauge("cache_slots", "Slots in use, over all rows, layers and KV heads.")
        self.budget_slots = gauge("cache_budget_slots", "Slots granted, over all rows, layers and KV heads.")
        self.allocated = gauge("cache_allocated_bytes", "Bytes allocated for the cache, evidence included.")
        self.packed = gauge("cache_packed_bytes", "Bytes of the cache that hold quantized slots.")
        self.full = gauge("cache_full_bytes", "Bytes that the running rows would take without eviction.")
        self.full_16bit = gauge("cache_full_16bit_bytes", "The same with 16-bit numbers.")
        self.evictions = counter("evictions_total", "Plans applied to a row, by what it was doing.", "policy", "reason")
        self.evicted_slots = counter("evicted_slots_total", "Slots evicted, over all layers and KV heads.")
        self.mass_dropped = counter("attention_mass_dropped_total", "Attention on evicted slots, in queries a KV head.")
        self.mass = counter("attention_mass_total", "Attention in all, in queries a KV head.")
        self.recent_mass_dropped = histogram(
            "recent_attention_dropped_ratio",
            "Of the attention since the eviction before, the share on the slots that an eviction drops.",
            _SMALL_SHARES,
        )
        self.persistence = histogram(
            "persistence_ratio",
            "Overlap of the half of the slots that mattered with the half that mattered next; 0.5 is chance. Sampled.",
            _OVERLAPS,
        )
        self.shadows = counter("shadows_total", "Comparisons with a full cache, by what became of them.", "result")
        self.shadow_tokens = counter("shadow_tokens_total", "Generated tokens compared with a full cache's.")
        self.shadow_same = counter("shadow_same_tokens_total", "Of those, tokens with the same most likely choice.")
        self.shadow_divergence = counter(
            "shadow_divergence_nats_total", "Sum over those tokens of the divergence from the full cache."
        )
        self.shadow_seconds = counter(
            "shadow_seconds_total", "Time of the engine that full caches to compare with took."
        )
        self.shadow_reserved = gauge("shadow_reserved_bytes", "Bytes set aside for full caches to compare with.")
        self.plans = counter("plans_total", "Plans applied, by who computed them.", "source", "phase")
        self.plan_latency = histogram("plan_latency_seconds", "From a snapshot to the manager's plan.")
        self.plans_late = counter("plans_late_total", "Plans of the manager that came too late or did not fit.")
        self.segments = counter("segments_total", "Segments of evicted slots, by what became of them.", "result")
        self.segment_bytes = counter("segment_bytes_total", "Encoded bytes of those segments.", "result")
        self.staged = gauge("segment_queue_bytes", "Encoded bytes that wait for the manager.")
        self.manager_errors = counter("manager_errors_total", "Calls to the manager that failed, by why.", "reason")
        self.manager_up = gauge("manager_up", "1 while the manager answers.")
        self.step = histogram("step_seconds", "One decode step of all running rows.")
        self.stall = StallMetrics(registry)
        self.suspension = SuspensionMetrics(registry)
        self.parking = ParkingMetrics(registry)
        self.prefix = PrefixMetrics(registry)
        self.recall = RecallMetrics(registry)
        self.model_name = model_name
        self.queue_capacity.set(queue)
        self.rows_capacity.set(rows)
        self._start_at_zero()

    def ended(self, result: str) -> None:
        """Count a request that ended."""
        self.requests.labels(self.model_name, result).inc()

    def _start_at_zero(self) -> None:
        for result in RESULTS:
            self.requests.labels(self.model_name, result)
        for phase in Phase:
            for policy in POLICIES:
                self.evictions.labels(policy, phase.value)
            for source in PlanSource:
                self.plans.labels(source.value, phase.value)
        for result in SEGMENT_RESULTS:
            self.segments.labels(result)
            self.segment_bytes.labels(result)
        for shadow in ShadowResult:
            self.shadows.labels(shadow.value)
        for reason in MANAGER_ERRORS:
            self.manager_errors.labels(reason)
