"""Budgets, what is resident of them, and how small that is."""

from grafana_foundation_sdk.models import units

from dashboards.queries import WORKER, Board, Graph, rate, ratio, summed

MEMORY = Board(
    "memory",
    "Scissorhands: memory",
    "What the caches hold against what was granted, and how much smaller than full caches they are.",
    (
        (
            "Budget",
            (
                Graph(
                    "Cache slots",
                    "Slots in use against those granted, over all rows, layers and KV heads. The first never passes "
                    "the second.",
                    units.Short,
                    (summed(f"{WORKER}cache_slots"), summed(f"{WORKER}cache_budget_slots")),
                ),
                Graph(
                    "Budget in use",
                    "Share of the granted slots that hold a token.",
                    units.PercentUnit,
                    (ratio(f"{WORKER}cache_slots", f"{WORKER}cache_budget_slots", "in use"),),
                ),
                Graph(
                    "Rows",
                    "Requests that hold a row, how many may, and how many more, of the size last asked for, would fit.",
                    units.Short,
                    (summed(f"{WORKER}rows"), summed(f"{WORKER}rows_capacity"), summed(f"{WORKER}more_rows")),
                ),
            ),
        ),
        (
            "Bytes",
            (
                Graph(
                    "Resident",
                    "Bytes allocated for the cache, evidence included, and how many of them hold quantized slots.",
                    units.BytesIEC,
                    (summed(f"{WORKER}cache_allocated_bytes"), summed(f"{WORKER}cache_packed_bytes")),
                ),
                Graph(
                    "Against full caches",
                    "Bytes allocated, and what the same rows would take without eviction: in the model's number type, "
                    "and in 16 bits.",
                    units.BytesIEC,
                    (
                        summed(f"{WORKER}cache_allocated_bytes"),
                        summed(f"{WORKER}cache_full_bytes"),
                        summed(f"{WORKER}cache_full_16bit_bytes"),
                    ),
                ),
                Graph(
                    "Beside the cache",
                    "Rows on their way to and from the store or put away, encoded segments that wait for the manager, "
                    "and what is set aside for full caches to compare with.",
                    units.BytesIEC,
                    (
                        summed(f"{WORKER}suspension_held_bytes"),
                        summed(f"{WORKER}segment_queue_bytes"),
                        summed(f"{WORKER}shadow_reserved_bytes"),
                    ),
                ),
            ),
        ),
        (
            "Compression, all bytes counted",
            (
                Graph(
                    "Compression",
                    "Bytes that the running rows would take in full, over the bytes allocated, evidence included.",
                    "suffix:x",
                    (
                        ratio(f"{WORKER}cache_full_bytes", f"{WORKER}cache_allocated_bytes", "the model's numbers"),
                        ratio(f"{WORKER}cache_full_16bit_bytes", f"{WORKER}cache_allocated_bytes", "16-bit numbers"),
                    ),
                ),
                Graph(
                    "Packed",
                    "Share of the allocated bytes that hold quantized slots.",
                    units.PercentUnit,
                    (ratio(f"{WORKER}cache_packed_bytes", f"{WORKER}cache_allocated_bytes", "packed"),),
                ),
                Graph(
                    "Slots evicted",
                    "Per second, over all layers and KV heads.",
                    units.Short,
                    (rate(f"{WORKER}evicted_slots_total"),),
                ),
            ),
        ),
    ),
)
