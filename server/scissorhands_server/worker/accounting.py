"""What a cache holds, and what an eviction adds to the figures of its task and of the worker."""

import time

from scissorhands.budget import HALF_BYTES
from scissorhands.cache import ResidentCache
from scissorhands.row import Eviction, Phase, PlanSource
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.task import Task


def show_cache(cache: ResidentCache, metrics: WorkerMetrics) -> None:
    """Set the gauges of a cache to what is true now."""
    rows = cache.rows
    metrics.cache_slots.set(sum(sum(row.lengths) * row.pool.kv_heads for row in rows))
    metrics.budget_slots.set(sum(sum(row.grant.layer_slots) * row.pool.kv_heads for row in rows))
    metrics.allocated.set(cache.allocated_bytes())
    metrics.packed.set(cache.packed_bytes())
    metrics.full.set(sum(cache.shape.full_bytes(row.step) for row in rows))
    metrics.full_16bit.set(sum(cache.shape.full_bytes(row.step, HALF_BYTES) for row in rows))


def count_attention(cache: ResidentCache, queries: int, metrics: WorkerMetrics) -> None:
    """Count what some queries gave: each gives 1 in all in every KV head of the layers that budgets govern."""
    metrics.mass.inc(queries * len(cache.shape.global_layers) * cache.shape.kv_heads)


def count_stall(task: Task, metrics: WorkerMetrics) -> None:
    """Count the time for which a prompt was held while its plan was on its way."""
    if task.held_since:
        held = time.monotonic() - task.held_since
        task.statistics.prefill_stall += held
        metrics.stall.prefill.inc(held)
        task.held_since = 0.0


def count_eviction(task: Task, eviction: Eviction, metrics: WorkerMetrics) -> None:
    """Count an eviction in the task's statistics and quality, and in the metrics."""
    statistics = task.statistics
    mass = eviction.mass()
    statistics.evictions += 1
    statistics.evicted_slots += eviction.slots
    statistics.mass_dropped += mass
    if eviction.phase is Phase.PREFILL:
        statistics.prefill_stall += eviction.waited
        metrics.stall.prefill.inc(eviction.waited)
    else:
        metrics.stall.decode.inc(eviction.waited)
    if eviction.source is PlanSource.MANAGER:
        statistics.plans_manager += 1
    else:
        statistics.plans_local += 1
    metrics.evictions.labels(task.grant.policy, eviction.phase.value).inc()
    metrics.evicted_slots.inc(eviction.slots)
    metrics.mass_dropped.inc(mass)
    metrics.plans.labels(eviction.source.value, eviction.phase.value).inc()
    recent, persistence = task.quality.evicted(eviction)
    metrics.recent_mass_dropped.observe(recent)
    if persistence is not None:
        metrics.persistence.observe(persistence)
