"""Traffic, latency, errors and the queue."""

from grafana_foundation_sdk.models import units

from dashboards.queries import MANAGER, WORKER, Board, Graph, Light, Query, chosen, of_result, quantiles, rate, summed

OVERVIEW = Board(
    "scissorhands",
    "Scissorhands: overview",
    "Is it up, what is asked of it, how fast are the answers, and what fails.",
    (
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
                    Query(chosen(f"{WORKER}manager_up"), "{{instance}}"),
                ),
                Light(
                    "Store, as the manager sees it",
                    "While it is away, segments are refused, and nothing is kept or resumed.",
                    Query(chosen(f"{MANAGER}store_up"), "{{instance}}"),
                ),
            ),
        ),
        (
            "Traffic",
            (
                Graph(
                    "Requests",
                    "Finished requests by result.",
                    units.RequestsPerSecond,
                    (rate(f"{WORKER}requests_total", "result"),),
                ),
                Graph(
                    "Requests by model",
                    "Finished requests by the model that answered.",
                    units.RequestsPerSecond,
                    (rate(f"{WORKER}requests_total", "model_name"),),
                ),
                Graph(
                    "Tokens",
                    "Prompt tokens read and tokens generated, per second.",
                    units.Short,
                    (rate(f"{WORKER}prompt_tokens_total"), rate(f"{WORKER}generated_tokens_total")),
                ),
            ),
        ),
        (
            "Latency",
            (
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
            ),
        ),
        (
            "Errors",
            (
                Graph(
                    "Requests that failed or were turned away",
                    "Share of all finished requests. error: a fault of the worker; overloaded: the queue was full.",
                    units.PercentUnit,
                    (
                        of_result(f"{WORKER}requests_total", "error", "error"),
                        of_result(f"{WORKER}requests_total", "overloaded", "overloaded"),
                        of_result(f"{WORKER}requests_total", "refused", "refused"),
                        of_result(f"{WORKER}requests_total", "cancelled", "cancelled"),
                    ),
                ),
                Graph(
                    "Errors between the parts",
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
            "Queue",
            (
                Graph(
                    "Queue",
                    "Requests that wait for a row, and how many may.",
                    units.Short,
                    (summed(f"{WORKER}queue_requests"), summed(f"{WORKER}queue_capacity_requests")),
                ),
                Graph(
                    "Rows",
                    "Requests that hold a row, how many may, and how many more, of the size last asked for, would fit.",
                    units.Short,
                    (
                        summed(f"{WORKER}rows"),
                        summed(f"{WORKER}rows_capacity"),
                        summed(f"{WORKER}more_rows"),
                        summed(f"{WORKER}preempted_rows"),
                    ),
                ),
                Graph(
                    "Preemptions",
                    "Rows that should make room for a more urgent request, per second, by whether they did and by what "
                    "there was not enough of.",
                    units.Short,
                    (rate(f"{WORKER}preemptions_total", "result", "reason"),),
                ),
                Graph(
                    "Time put away",
                    "From putting a row away to going on with it.",
                    units.Seconds,
                    quantiles(f"{WORKER}preempted_seconds"),
                ),
            ),
        ),
    ),
)
