"""Inside the worker and the manager: steps, plans, stall, calls."""

from grafana_foundation_sdk.models import units

from dashboards.queries import MANAGER, WORKER, Board, Graph, busy, of_result, quantiles, rate, share, summed

INTERNALS = Board(
    "internals",
    "Scissorhands: internals",
    "How long a step and a plan take, who plans, what waits for it, and what the manager is asked.",
    (
        (
            "Worker",
            (
                Graph(
                    "Decode step",
                    "One step of all rows whose prompts are read.",
                    units.Seconds,
                    quantiles(f"{WORKER}step_seconds"),
                ),
                Graph(
                    "Steps",
                    "Decode steps, and tokens that they generated, per second.",
                    units.Short,
                    (rate(f"{WORKER}generated_tokens_total"), rate(f"{WORKER}step_seconds_count")),
                ),
                Graph(
                    "Tokens a step",
                    "Rows that one decode step serves.",
                    units.Short,
                    (share(f"{WORKER}generated_tokens_total", f"{WORKER}step_seconds_count", "tokens"),),
                ),
            ),
        ),
        (
            "Plans",
            (
                Graph(
                    "Plans applied",
                    "By who computed them and what the row was doing, per second. All are the same whoever computes "
                    "them.",
                    units.Short,
                    (rate(f"{WORKER}plans_total", "source", "phase"), rate(f"{WORKER}plans_late_total")),
                ),
                Graph(
                    "Plan latency",
                    "From the snapshot to its plan, at the worker.",
                    units.Seconds,
                    quantiles(f"{WORKER}plan_latency_seconds"),
                ),
                Graph(
                    "Prefill stall",
                    "Seconds per second that prefill waited for plans.",
                    units.PercentUnit,
                    (rate(f"{WORKER}prefill_stall_seconds_total"),),
                ),
                Graph(
                    "Plan computation",
                    "At the manager, waiting excluded.",
                    units.Seconds,
                    quantiles(f"{MANAGER}plan_compute_seconds"),
                ),
                Graph(
                    "Plans asked for",
                    "At the manager, by what became of it, per second.",
                    units.Short,
                    (rate(f"{MANAGER}plans_total", "result"),),
                ),
                Graph(
                    "Plans not computed",
                    "Share of the plans asked for that were turned away or failed.",
                    units.PercentUnit,
                    (
                        of_result(f"{MANAGER}plans_total", "shed", "shed"),
                        of_result(f"{MANAGER}plans_total", "refused|failed", "refused or failed"),
                    ),
                ),
                Graph(
                    "Snapshots received",
                    "Bytes of evidence, at the manager.",
                    units.BytesPerSecondIEC,
                    (rate(f"{MANAGER}snapshot_bytes_total"),),
                ),
            ),
        ),
        (
            "Manager",
            (
                Graph("Sessions", "By state.", units.Short, (summed(f"{MANAGER}sessions", "state"),)),
                Graph("Grants", "By result, per second.", units.Short, (rate(f"{MANAGER}grants_total", "result"),)),
                Graph(
                    "Budgets",
                    "Grants by what their KV heads share the budget by, and pairs of snapshots that measured budgets "
                    "learn from, per second.",
                    units.Short,
                    (rate(f"{MANAGER}budgets_total", "source"), rate(f"{MANAGER}compared_snapshots_total")),
                ),
                Graph(
                    "Rows and prefixes",
                    "Rows to suspend and to resume, prefixes to store and to give out, by result, per second.",
                    units.Short,
                    (
                        busy(rate(f"{MANAGER}suspensions_total", "result", prefix="suspend ")),
                        busy(rate(f"{MANAGER}resumptions_total", "result", prefix="resume ")),
                        busy(rate(f"{MANAGER}prefix_stores_total", "result", prefix="prefix stored ")),
                        busy(rate(f"{MANAGER}prefix_loads_total", "result", prefix="prefix loaded ")),
                    ),
                ),
                Graph(
                    "Calls",
                    "By method and status, per second; those that happen at all.",
                    units.RequestsPerSecond,
                    (busy(rate(f"{MANAGER}grpc_requests_total", "method", "code")),),
                ),
                Graph(
                    "Errors of the manager at the worker",
                    "Calls that failed, by why, per second.",
                    units.Short,
                    (rate(f"{WORKER}manager_errors_total", "reason"),),
                ),
            ),
        ),
    ),
)
