"""The panels of the Grafana dashboard, as data."""

from dashboard_queries import MANAGER, WORKER, Graph, Light, Query, busy, mean, quantiles, rate, share, summed
from grafana_foundation_sdk.models import units

ROWS: tuple[tuple[str, tuple[Graph | Light, ...]], ...] = (
    (
        "Health",
        (
            Light(
                "Processes",
                "Prometheus reaches the process.",
                Query('up{job=~"scissorhands-.+"}', "{{job}} {{instance}}"),
            ),
            Light(
                "Manager, as the worker sees it",
                "While it is away, budgets and plans are local and segments are dropped.",
                Query(f"{WORKER}manager_up", "{{instance}}"),
            ),
            Light(
                "Store, as the manager sees it",
                "While it is away, segments are refused.",
                Query(f"{MANAGER}store_up", "{{instance}}"),
            ),
        ),
    ),
    (
        "Traffic and latency",
        (
            Graph(
                "Requests",
                "Finished requests by result.",
                units.RequestsPerSecond,
                (rate(f"{WORKER}requests_total", "result"),),
            ),
            Graph(
                "Tokens",
                "Prompt tokens read and tokens generated, per second.",
                units.Short,
                (rate(f"{WORKER}prompt_tokens_total"), rate(f"{WORKER}generated_tokens_total")),
            ),
            Graph(
                "Rows and queue",
                "Requests that hold a row or wait for one, how many may, and how many more rows would fit.",
                units.Short,
                (
                    summed(f"{WORKER}rows"),
                    summed(f"{WORKER}rows_capacity"),
                    summed(f"{WORKER}more_rows"),
                    summed(f"{WORKER}queue_requests"),
                    summed(f"{WORKER}queue_capacity_requests"),
                ),
            ),
            Graph(
                "Time to first token",
                "From arrival.",
                units.Seconds,
                quantiles(f"{WORKER}time_to_first_token_seconds"),
            ),
            Graph(
                "Time between tokens",
                "While decoding.",
                units.Seconds,
                quantiles(f"{WORKER}inter_token_latency_seconds"),
            ),
            Graph(
                "Time in the queue",
                "From arrival to the start of prefill.",
                units.Seconds,
                quantiles(f"{WORKER}queue_time_seconds"),
            ),
            Graph(
                "Preemptions",
                "Rows that should make room for a more urgent request, per second, by whether they did and by what "
                "there was not enough of; and how many are put away now.",
                units.Short,
                (rate(f"{WORKER}preemptions_total", "result", "reason"), summed(f"{WORKER}preempted_rows")),
            ),
            Graph(
                "Time put away",
                "From putting a row away to going on with it.",
                units.Seconds,
                quantiles(f"{WORKER}preempted_seconds"),
            ),
        ),
    ),
    (
        "Cache",
        (
            Graph(
                "Cache slots",
                "Slots in use against the budget granted, over all layers and KV heads. The first never passes it.",
                units.Short,
                (summed(f"{WORKER}cache_slots"), summed(f"{WORKER}cache_budget_slots")),
            ),
            Graph(
                "Cache memory",
                "Bytes allocated, evidence included; how many of them are quantized; what the rows would take in full; "
                "what is set aside for full caches to compare with.",
                units.BytesIEC,
                (
                    summed(f"{WORKER}cache_allocated_bytes"),
                    summed(f"{WORKER}cache_packed_bytes"),
                    summed(f"{WORKER}cache_full_bytes"),
                    summed(f"{WORKER}shadow_reserved_bytes"),
                ),
            ),
            Graph(
                "Compression",
                "Bytes that the running rows would take in full, over the bytes allocated.",
                units.Short,
                (
                    Query(
                        f"sum({WORKER}cache_full_bytes) / (sum({WORKER}cache_allocated_bytes) > 0)",
                        "times smaller",
                    ),
                ),
            ),
            Graph(
                "Evictions",
                "By policy and reason, per second.",
                units.Short,
                (rate(f"{WORKER}evictions_total", "policy", "reason"),),
            ),
            Graph(
                "Slots evicted",
                "Per second, over all layers and KV heads.",
                units.Short,
                (rate(f"{WORKER}evicted_slots_total"),),
            ),
            Graph(
                "Attention dropped",
                "Share of all attention that lay on evicted slots up to their eviction.",
                units.PercentUnit,
                (share(f"{WORKER}attention_mass_dropped_total", f"{WORKER}attention_mass_total", "dropped"),),
            ),
        ),
    ),
    (
        "Quality",
        (
            Graph(
                "Recent attention dropped",
                "Of the attention since the eviction before, the share on the slots that an eviction drops. As far as "
                "importance persists, the next queries lose that much. Raise the budget if it is too much.",
                units.PercentUnit,
                (
                    mean(f"{WORKER}recent_attention_dropped_ratio"),
                    *quantiles(f"{WORKER}recent_attention_dropped_ratio")[1:],
                ),
            ),
            Graph(
                "Persistence of importance",
                "Overlap of the half of the slots that mattered with the half that mattered next; 50 % is chance.",
                units.PercentUnit,
                (mean(f"{WORKER}persistence_ratio"), quantiles(f"{WORKER}persistence_ratio")[0]),
            ),
            Graph(
                "Divergence from a full cache",
                "Nats per generated token, over the answers that are compared.",
                units.Short,
                (share(f"{WORKER}shadow_divergence_nats_total", f"{WORKER}shadow_tokens_total", "nats per token"),),
            ),
            Graph(
                "Same choice as a full cache",
                "Share of the compared tokens at which both have the same most likely token.",
                units.PercentUnit,
                (share(f"{WORKER}shadow_same_tokens_total", f"{WORKER}shadow_tokens_total", "same"),),
            ),
            Graph(
                "Comparisons with a full cache",
                "By what became of them, per second.",
                units.Short,
                (rate(f"{WORKER}shadows_total", "result"),),
            ),
            Graph(
                "Cost of comparing",
                "Share of the engine's time that comparing takes.",
                units.PercentUnit,
                (rate(f"{WORKER}shadow_seconds_total"),),
            ),
        ),
    ),
    (
        "Plans",
        (
            Graph(
                "Plans",
                "By who computed them and when, per second.",
                units.Short,
                (rate(f"{WORKER}plans_total", "source", "phase"), rate(f"{WORKER}plans_late_total")),
            ),
            Graph(
                "Plan latency",
                "From the snapshot to its plan, at the worker.",
                units.Seconds,
                quantiles(f"{WORKER}plan_latency_seconds"),
            ),
            Graph("Plan computation", "At the manager.", units.Seconds, quantiles(f"{MANAGER}plan_compute_seconds")),
            Graph(
                "Prefill stall",
                "Seconds per second that prefill waited for plans.",
                units.PercentUnit,
                (rate(f"{WORKER}prefill_stall_seconds_total"),),
            ),
            Graph(
                "Snapshots received",
                "At the manager.",
                units.BytesPerSecondIEC,
                (rate(f"{MANAGER}snapshot_bytes_total"),),
            ),
            Graph(
                "Answers of the manager",
                "Plans by result, per second.",
                units.Short,
                (rate(f"{MANAGER}plans_total", "result"),),
            ),
        ),
    ),
    (
        "Segments and store",
        (
            Graph(
                "Segments",
                "What evictions encoded: sent by the worker by result, stored and refused by the manager.",
                units.Short,
                (
                    rate(f"{WORKER}segments_total", "result"),
                    rate(f"{MANAGER}segments_stored_total"),
                    rate(f"{MANAGER}segments_refused_total", "reason", prefix="refused "),
                ),
            ),
            Graph(
                "Segment traffic",
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
            Graph(
                "Store size",
                "Bytes of the sessions that the managers remember.",
                units.BytesIEC,
                (summed(f"{MANAGER}store_bytes"),),
            ),
            Graph(
                "Store operations, 99 %",
                "By method.",
                units.Seconds,
                quantiles(f"{MANAGER}store_operation_seconds", "method")[2:],
            ),
            Graph(
                "Errors",
                "Of the store at the manager, and of the manager at the worker, per second.",
                units.Short,
                (
                    rate(f"{MANAGER}store_errors_total", "reason", prefix="store "),
                    rate(f"{WORKER}manager_errors_total", "reason", prefix="manager "),
                ),
            ),
        ),
    ),
    (
        "Kept sessions",
        (
            Graph(
                "Turns that resume",
                "Turns of sessions that are kept, by whether their row was resumed or why not, per second.",
                units.Short,
                (busy(rate(f"{WORKER}resumes_total", "result")),),
            ),
            Graph(
                "Rows kept",
                "By what became of them at the end of a turn, per second.",
                units.Short,
                (busy(rate(f"{WORKER}suspends_total", "result")),),
            ),
            Graph(
                "Time to resume and to suspend",
                "From asking for a row to having it, and from the end of an answer to its row being in the store.",
                units.Seconds,
                tuple(
                    Query(quantiles(f"{WORKER}{name}_seconds")[2].expression, f"{name}, 99 %")
                    for name in ("resume", "suspend")
                ),
            ),
        ),
    ),
    (
        "Shared prefixes",
        (
            Graph(
                "Prefixes asked for",
                "Prompts, by whether what they begin with came from the store or why not, per second.",
                units.Short,
                (busy(rate(f"{WORKER}prefix_lookups_total", "result")),),
            ),
            Graph(
                "Prompt tokens",
                "Read, and not read because their prefix was stored, per second.",
                units.Short,
                (rate(f"{WORKER}prompt_tokens_total"), rate(f"{WORKER}prefix_tokens_total")),
            ),
            Graph(
                "Time to find a prefix",
                "From asking to having it, or to knowing that there is none; and seconds per second that were saved.",
                units.Seconds,
                (*quantiles(f"{WORKER}prefix_lookup_seconds"), rate(f"{WORKER}prefix_saved_seconds_total")),
            ),
            Graph(
                "Recalls",
                "Times that rows asked for evicted slots, and segments that were missed, per second.",
                units.Short,
                (busy(rate(f"{WORKER}recalls_total", "result")), rate(f"{WORKER}recall_misses_total", "reason")),
            ),
        ),
    ),
    (
        "Space in the store",
        (
            Graph(
                "Stored",
                "Bytes of whole objects, by kind; every manager tells the same.",
                units.BytesIEC,
                (Query(f"max by (kind) ({MANAGER}stored_bytes)", "{{kind}}"),),
            ),
            Graph(
                "Objects",
                "By kind; every manager tells the same.",
                units.Short,
                (Query(f"max by (kind) ({MANAGER}stored_objects)", "{{kind}}"),),
            ),
            Graph(
                "Memory of the store",
                "By its own account, and the most that it may take; 0 if there is no bound.",
                units.BytesIEC,
                (
                    Query(f"max({MANAGER}store_memory_bytes)", "taken"),
                    Query(f"max({MANAGER}store_most_memory_bytes)", "most"),
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
    (
        "Cache manager",
        (
            Graph("Sessions", "By state.", units.Short, (summed(f"{MANAGER}sessions", "state"),)),
            Graph("Grants", "By result, per second.", units.Short, (rate(f"{MANAGER}grants_total", "result"),)),
            Graph(
                "Calls",
                "By method and status, per second; those that happen at all.",
                units.RequestsPerSecond,
                (busy(rate(f"{MANAGER}grpc_requests_total", "method", "code")),),
            ),
        ),
    ),
)
