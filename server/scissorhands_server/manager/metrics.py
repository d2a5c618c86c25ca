"""The manager's metrics. Every series exists at zero from the start; labels come from small closed sets."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scissorhands.ledger import Ledger, SessionState
from scissorhands.v1 import budget_pb2, cache_manager_pb2
from scissorhands_server.manager.plan_queue import SHED_REASONS
from scissorhands_server.manager.space_metrics import SpaceMetrics
from scissorhands_server.status import STATUS_TABLE
from scissorhands_server.store.decorator import METHODS as STORE_METHODS

GRANT_RESULTS = ("granted", "repeated", "refused", "full")
BUDGET_SOURCES = {
    budget_pb2.BUDGET_SOURCE_EQUAL: "equal",
    budget_pb2.BUDGET_SOURCE_PROFILE: "profile",
    budget_pb2.BUDGET_SOURCE_MEASURED: "measured",
}
PLAN_RESULTS = ("computed", "refused", "shed", "failed", "cancelled")
REFUSAL_REASONS = ("corrupt", "too_large", "store_unavailable", "store_full", "quota", "session_closed")
RECALL_MISSES = ("absent", "corrupt", "mismatch", "no_summary")
SUSPENSION_RESULTS = (
    "done",
    "conflict",
    "mismatch",
    "corrupt",
    "missing",
    "store_unavailable",
    "store_full",
    "quota",
    "refused",
    "cancelled",
    "failed",
)
STORE_ERRORS = ("timeout", "unreachable", "refused", "full")
CODES = tuple(sorted({"OK", "CANCELLED", *(row.code.name for row in STATUS_TABLE.values())}))
SERVICE = cache_manager_pb2.DESCRIPTOR.services_by_name["CacheManagerService"]
METHODS = tuple(method.name for method in SERVICE.methods)

_PLAN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_STORE_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class ManagerMetrics:
    """All series of one manager.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"scissorhands_manager_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"scissorhands_manager_{name}", text, labels, registry=registry)

        self.sessions = gauge("sessions", "Sessions that hold a lease or segments, by state.", "state")
        self.grants = counter("grants_total", "Grants asked for, by what became of it.", "result")
        self.budgets = counter("budgets_total", "Grants, by what their KV heads share the budget by.", "source")
        self.compared_snapshots = counter(
            "compared_snapshots_total", "Pairs of snapshots that measured budgets have learned from."
        )
        self.plans = counter("plans_total", "Plans asked for, by what became of it.", "result")
        self.plan_compute = Histogram(
            "scissorhands_manager_plan_compute_seconds",
            "Time to compute a plan, waiting excluded.",
            buckets=_PLAN_SECONDS,
            registry=registry,
        )
        self.plans_shed = counter("plans_shed_total", "Snapshots turned away, by why.", "reason")
        self.plan_latency = Histogram(
            "scissorhands_manager_plan_latency_seconds",
            "From the first message of a call for plans to its answer.",
            buckets=_PLAN_SECONDS,
            registry=registry,
        )
        self.plan_batch = Histogram(
            "scissorhands_manager_plan_batch_snapshots",
            "Snapshots of one call.",
            buckets=(1, 2, 4, 8, 16),
            registry=registry,
        )
        self.snapshot_bytes = counter("snapshot_bytes_total", "Bytes of evidence received.")
        self.segments_stored = counter("segments_stored_total", "Segments stored.")
        self.segments_refused = counter("segments_refused_total", "Segments not stored, by reason.", "reason")
        self.segment_bytes_stored = counter("segment_bytes_stored_total", "Encoded bytes of the segments stored.")
        self.suspensions = counter("suspensions_total", "Rows to suspend, by what became of it.", "result")
        self.resumptions = counter("resumptions_total", "Rows to resume, by what became of it.", "result")
        self.suspended_bytes = counter("suspended_bytes_total", "Bytes of suspended rows stored.")
        self.resumed_bytes = counter("resumed_bytes_total", "Bytes of suspended rows given out.")
        self.recalls = counter("recalls_total", "Times that segments were searched for what a row asks for.")
        self.recall_misses = counter(
            "recall_misses_total", "Segments that could not be searched or read for it, by reason.", "reason"
        )
        self.recall_sections = counter("recall_sections_total", "Sections given out to choose recalled slots from.")
        self.recall_bytes = counter("recall_bytes_total", "Bytes of those sections.")
        self.prefix_loads = counter("prefix_loads_total", "Prefixes to give out, by what became of it.", "result")
        self.prefix_stores = counter("prefix_stores_total", "Prefixes to store, by what became of it.", "result")
        self.prefixes_broken = counter("prefixes_broken_total", "Stored prefixes deleted because they were not whole.")
        self.prefix_loaded_bytes = counter("prefix_loaded_bytes_total", "Bytes of prefixes given out.")
        self.prefix_stored_bytes = counter("prefix_stored_bytes_total", "Bytes of prefixes stored.")
        self.store_bytes = gauge("store_bytes", "Bytes in the store of the sessions that this manager remembers.")
        self.store_errors = counter("store_errors_total", "Calls to the store that failed, by reason.", "reason")
        self.store_operation = Histogram(
            "scissorhands_manager_store_operation_seconds",
            "Time of calls to the store, failed ones included.",
            ["method"],
            buckets=_STORE_SECONDS,
            registry=registry,
        )
        self.store_up = gauge("store_up", "Whether the store answered last.")
        self.store_breaker_open = gauge(
            "store_breaker_open", "1 while calls to the store are refused, because several in a row got no answer."
        )
        self.grpc_requests = counter("grpc_requests_total", "Calls that ended, by method and status.", "method", "code")
        self.space = SpaceMetrics(registry)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        for state in SessionState:
            self.sessions.labels(state.value)
        for family, values in (
            (self.grants, GRANT_RESULTS),
            (self.budgets, tuple(BUDGET_SOURCES.values())),
            (self.plans, PLAN_RESULTS),
            (self.plans_shed, SHED_REASONS),
            (self.segments_refused, REFUSAL_REASONS),
            (self.suspensions, SUSPENSION_RESULTS),
            (self.resumptions, (*SUSPENSION_RESULTS, "new")),
            (self.recall_misses, RECALL_MISSES),
            (self.prefix_loads, SUSPENSION_RESULTS),
            (self.prefix_stores, SUSPENSION_RESULTS),
            (self.store_errors, STORE_ERRORS),
            (self.store_operation, STORE_METHODS),
        ):
            for value in values:
                family.labels(value)
        for method in METHODS:
            for code in CODES:
                self.grpc_requests.labels(method, code)

    def call_ended(self, method: str, code: str) -> None:
        """Count a call by its full method name and the name of its status."""
        self.grpc_requests.labels(method.rpartition("/")[2], code).inc()

    def show(self, ledger: Ledger) -> None:
        """Set the gauges to what the ledger holds."""
        for state, count in ledger.counts().items():
            self.sessions.labels(state.value).set(count)
        self.store_bytes.set(ledger.segment_bytes)
