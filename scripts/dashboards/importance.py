"""What evictions drop, whether importance persists, and what comes back."""

from grafana_foundation_sdk.models import units

from dashboards.queries import WORKER, Board, Graph, busy, mean, quantiles, rate, share

IMPORTANCE = Board(
    "importance",
    "Scissorhands: importance",
    "Why slots are evicted, how much attention lay on them, and whether the hypothesis that importance persists holds.",
    (
        (
            "Evictions",
            (
                Graph(
                    "Evictions by reason",
                    "Plans applied, by what the row was doing when it was full, per second.",
                    units.Short,
                    (rate(f"{WORKER}evictions_total", "reason"),),
                ),
                Graph(
                    "Evictions by policy",
                    "Plans applied, by the row's policy, per second; those that happen at all.",
                    units.Short,
                    (busy(rate(f"{WORKER}evictions_total", "policy")),),
                ),
                Graph(
                    "Slots evicted",
                    "Per second, over all layers and KV heads.",
                    units.Short,
                    (rate(f"{WORKER}evicted_slots_total"),),
                ),
            ),
        ),
        (
            "Attention",
            (
                Graph(
                    "Attention dropped",
                    "Share of all attention that lay on evicted slots up to their eviction.",
                    units.PercentUnit,
                    (share(f"{WORKER}attention_mass_dropped_total", f"{WORKER}attention_mass_total", "dropped"),),
                ),
                Graph(
                    "Recent attention dropped",
                    "Of the attention since the eviction before, the share on the slots that an eviction drops. As far "
                    "as importance persists, the next queries lose that much. Raise the budget if it is too much.",
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
            ),
        ),
        (
            "Recall",
            (
                Graph(
                    "Recalls",
                    "Times that rows asked for evicted slots, by what came, per second.",
                    units.Short,
                    (busy(rate(f"{WORKER}recalls_total", "result")),),
                ),
                Graph(
                    "Slots recalled",
                    "And the sections that they were chosen from, per second.",
                    units.Short,
                    (rate(f"{WORKER}recalled_slots_total"), rate(f"{WORKER}recalled_sections_total")),
                ),
                Graph(
                    "Recalls missed",
                    "Segments that could not be recalled, by reason, per second.",
                    units.Short,
                    (rate(f"{WORKER}recall_misses_total", "reason"),),
                ),
                Graph(
                    "Recall latency",
                    "From asking for evicted slots to having them in their places, or to knowing that not.",
                    units.Seconds,
                    quantiles(f"{WORKER}recall_seconds"),
                ),
            ),
        ),
        (
            "Against a full cache",
            (
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
    ),
)
