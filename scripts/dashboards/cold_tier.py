"""What comes from the store and what goes there: hits, misses and why, bytes, latency, and the breaker."""

from grafana_foundation_sdk.models import units

from dashboards.queries import (
    MANAGER,
    WORKER,
    Board,
    Graph,
    Light,
    Query,
    busy,
    chosen,
    largest,
    of_result,
    quantiles,
    rate,
    summed,
)

_LATENCIES = {
    "resume": f"{WORKER}resume_seconds",
    "suspend": f"{WORKER}suspend_seconds",
    "prefix": f"{WORKER}prefix_lookup_seconds",
    "recall": f"{WORKER}recall_seconds",
}

COLD_TIER = Board(
    "cold-tier",
    "Scissorhands: cold tier",
    "What is found in the store, why not if not, how much is moved and how fast, and whether the store holds up.",
    (
        (
            "Hits and misses",
            (
                Graph(
                    "Hit rate",
                    "Share of turns whose row was resumed, of prompts whose prefix was stored, and of recalls to which "
                    "something came.",
                    units.PercentUnit,
                    (
                        of_result(f"{WORKER}resumes_total", "resumed", "resume"),
                        of_result(f"{WORKER}prefix_lookups_total", "hit", "prefix"),
                        of_result(f"{WORKER}recalls_total", "recalled", "recall"),
                    ),
                ),
                Graph(
                    "Turns that resume",
                    "Turns of sessions that are kept, by whether their row was resumed or why not, per second.",
                    units.Short,
                    (busy(rate(f"{WORKER}resumes_total", "result")),),
                ),
                Graph(
                    "Prefixes asked for",
                    "Prompts, by whether what they begin with came from the store or why not, per second.",
                    units.Short,
                    (busy(rate(f"{WORKER}prefix_lookups_total", "result")),),
                ),
                Graph(
                    "Rows kept",
                    "By what became of them at the end of a turn, per second.",
                    units.Short,
                    (busy(rate(f"{WORKER}suspends_total", "result")),),
                ),
                Graph(
                    "Prefixes kept",
                    "Boundaries of prompts, by what became of them, per second.",
                    units.Short,
                    (busy(rate(f"{WORKER}prefix_stores_total", "result")),),
                ),
                Graph(
                    "Tokens not read",
                    "Prompt tokens read, and not read because their row or prefix was stored, per second.",
                    units.Short,
                    (
                        rate(f"{WORKER}prompt_tokens_total"),
                        rate(f"{WORKER}resumed_tokens_total"),
                        rate(f"{WORKER}prefix_tokens_total"),
                    ),
                ),
            ),
        ),
        (
            "Segments",
            (
                Graph(
                    "Segments",
                    "What evictions encoded: sent by the worker by result, stored and refused by the manager, per "
                    "second.",
                    units.Short,
                    (
                        rate(f"{WORKER}segments_total", "result"),
                        rate(f"{MANAGER}segments_stored_total"),
                        rate(f"{MANAGER}segments_refused_total", "reason", prefix="refused "),
                    ),
                ),
                Graph(
                    "Segment bytes",
                    "Encoded bytes: sent by the worker by result, stored by the manager.",
                    units.BytesPerSecondIEC,
                    (rate(f"{WORKER}segment_bytes_total", "result"), rate(f"{MANAGER}segment_bytes_stored_total")),
                ),
                Graph(
                    "Segments that wait at the worker",
                    "In the bounded queue.",
                    units.BytesIEC,
                    (summed(f"{WORKER}segment_queue_bytes"),),
                ),
            ),
        ),
        (
            "Bytes and latency",
            (
                Graph(
                    "Bytes from the store",
                    "Of rows, of prefixes, and of evicted slots that are asked for.",
                    units.BytesPerSecondIEC,
                    (
                        rate(f"{WORKER}resume_bytes_total"),
                        rate(f"{WORKER}prefix_load_bytes_total"),
                        rate(f"{WORKER}recall_bytes_total"),
                    ),
                ),
                Graph(
                    "Bytes to the store",
                    "Of rows, of prefixes, and of segments.",
                    units.BytesPerSecondIEC,
                    (
                        rate(f"{WORKER}suspend_bytes_total"),
                        rate(f"{WORKER}prefix_store_bytes_total"),
                        rate(f"{MANAGER}segment_bytes_stored_total"),
                    ),
                ),
                Graph(
                    "Latency, 99 %",
                    "From asking to having it, or to knowing that not; of suspend, from the end of an answer to its "
                    "row being in the store.",
                    units.Seconds,
                    tuple(Query(quantiles(metric)[2].expression, name) for name, metric in _LATENCIES.items()),
                ),
                Graph(
                    "Time saved by prefixes",
                    "Seconds per second: what reading would have taken, less what loading took.",
                    units.PercentUnit,
                    (rate(f"{WORKER}prefix_saved_seconds_total"),),
                ),
                Graph(
                    "Store operations, 99 %",
                    "By method, at the manager.",
                    units.Seconds,
                    quantiles(f"{MANAGER}store_operation_seconds", "method")[2:],
                ),
            ),
        ),
        (
            "The store",
            (
                Light(
                    "Store, as the manager sees it",
                    "While it is away, segments are refused, and nothing is kept or resumed.",
                    Query(chosen(f"{MANAGER}store_up"), "{{instance}}"),
                ),
                Graph(
                    "Breaker",
                    "1 while calls to the store are refused at once, because several in a row got no answer.",
                    units.Short,
                    (Query(chosen(f"{MANAGER}store_breaker_open"), "{{instance}}"),),
                ),
                Graph(
                    "Failed calls to the store",
                    "By reason, per second; those that the breaker refuses are no calls.",
                    units.Short,
                    (rate(f"{MANAGER}store_errors_total", "reason"),),
                ),
                Graph(
                    "Stored",
                    "Bytes of whole objects, by kind; every manager tells the same.",
                    units.BytesIEC,
                    (largest(f"{MANAGER}stored_bytes", "kind"),),
                ),
                Graph(
                    "Objects",
                    "By kind; every manager tells the same.",
                    units.Short,
                    (largest(f"{MANAGER}stored_objects", "kind"),),
                ),
                Graph(
                    "Memory of the store",
                    "By its own account, and the most that it may take; 0 if there is no bound.",
                    units.BytesIEC,
                    (
                        largest(f"{MANAGER}store_memory_bytes", legend="taken"),
                        largest(f"{MANAGER}store_most_memory_bytes", legend="most"),
                        summed(f"{MANAGER}store_bytes"),
                    ),
                ),
                Graph(
                    "Objects evicted",
                    "To stay within a quota or below the high-water mark, or because a part was missing, per second.",
                    units.Short,
                    (busy(rate(f"{MANAGER}evicted_objects_total", "kind", "reason")),),
                ),
                Graph(
                    "Bytes evicted",
                    "Of these objects.",
                    units.BytesPerSecondIEC,
                    (busy(rate(f"{MANAGER}evicted_object_bytes_total", "kind", "reason")),),
                ),
                Graph(
                    "Refused and mended",
                    "Objects that found no room, and what the janitor mended, per second.",
                    units.Short,
                    (
                        rate(f"{MANAGER}quota_refusals_total", "kind", prefix="refused "),
                        rate(f"{MANAGER}janitor_mends_total", "result", prefix="mended "),
                    ),
                ),
            ),
        ),
    ),
)
