"""What the panels of the dashboards are made of: queries, graphs and lights."""

from dataclasses import dataclass

WORKER = "scissorhands_worker_"
MANAGER = "scissorhands_manager_"
# What can be chosen in a dashboard, by the variable's name. The model is a label of one family of a worker's, so it
# chooses the workers that serve it, and these everything else of theirs.
FILTERS = {WORKER: 'instance=~"$worker"', MANAGER: 'instance=~"$manager"'}
MORE_FILTERS = {
    f"{WORKER}requests_total": 'model_name=~"$model"',
    f"{WORKER}evictions_total": 'policy=~"$policy"',
}


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the legend of its series, where ``{{label}}`` stands for a label's value."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Graph:
    """A panel that draws series over time."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Light:
    """A panel that is green while its series are 1 and red while they are 0."""

    title: str
    description: str
    query: Query


@dataclass(frozen=True)
class Board:
    """A dashboard.

    Args:
        name: Name of its file, without the ending.
        title: What it is called.
        description: What it answers.
        rows: Its panels under their headings.
    """

    name: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Graph | Light, ...]], ...]

    @property
    def queries(self) -> tuple[Query, ...]:
        """All queries of all panels."""
        panels = [panel for _, row in self.rows for panel in row]
        return tuple(
            query for panel in panels for query in (panel.queries if isinstance(panel, Graph) else (panel.query,))
        )


def chosen(metric: str, suffix: str = "") -> str:
    """Return the series of a metric that the dashboard's variables choose."""
    prefix = WORKER if metric.startswith(WORKER) else MANAGER
    filters = [FILTERS[prefix], *([MORE_FILTERS[metric]] if metric in MORE_FILTERS else [])]
    return f"{metric}{suffix}{{{', '.join(filters)}}}"


def summed(metric: str, *labels: str) -> Query:
    """Return the sum of a gauge over all processes, one series for each value of the labels."""
    return Query(f"sum{_by(labels)} ({chosen(metric)})", _legend(metric, labels))


def largest(metric: str, *labels: str, legend: str = "") -> Query:
    """Return a gauge of which every process tells the same, one series for each value of the labels."""
    return Query(f"max{_by(labels)} ({chosen(metric)})", legend or _legend(metric, labels))


def rate(metric: str, *labels: str, prefix: str = "") -> Query:
    """Return the increase per second of a counter, one series for each value of the labels."""
    return Query(f"sum{_by(labels)} ({_rate(metric)})", f"{prefix}{_legend(metric, labels)}")


def quantiles(metric: str, *labels: str) -> tuple[Query, ...]:
    """Return the median, the 90th and the 99th percentile of a histogram."""
    suffix = "".join(f" {{{{{label}}}}}" for label in labels)
    buckets = f"sum{_by(('le', *labels))} ({_rate(metric, '_bucket')})"
    return tuple(
        Query(f"histogram_quantile({q}, {buckets})", f"{name}{suffix}")
        for q, name in ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %"))
    )


def busy(query: Query) -> Query:
    """Return a query without its series that are zero, where there are too many to show."""
    return Query(f"{query.expression} > 0", query.legend)


def share(part: str, whole: str, legend: str) -> Query:
    """Return one counter's increase over another's; nothing is drawn while the other stands still."""
    return Query(f"sum({_rate(part)}) / (sum({_rate(whole)}) > 0)", legend)


def ratio(part: str, whole: str, legend: str) -> Query:
    """Return one gauge over another; nothing is drawn while the other is zero."""
    return Query(f"sum({chosen(part)}) / (sum({chosen(whole)}) > 0)", legend)


def mean(metric: str) -> Query:
    """Return the mean of a histogram."""
    return Query(f"sum({_rate(metric, '_sum')}) / (sum({_rate(metric, '_count')}) > 0)", "mean")


def of_result(metric: str, results: str, legend: str) -> Query:
    """Return the share of a counter's increase that has one of the results, as a regular expression."""
    all_of_it = chosen(metric)
    part = f'{all_of_it[:-1]}, result=~"{results}"}}'
    return Query(
        f"sum(rate({part}[$__rate_interval])) / (sum(rate({all_of_it}[$__rate_interval])) > 0)",
        legend,
    )


def _rate(metric: str, suffix: str = "") -> str:
    return f"rate({chosen(metric, suffix)}[$__rate_interval])"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _legend(metric: str, labels: tuple[str, ...]) -> str:
    """Return the template of the series' names: the labels, or the metric's name in words."""
    name = metric.removeprefix(WORKER).removeprefix(MANAGER)
    return " ".join(f"{{{{{label}}}}}" for label in labels) or name.removesuffix("_total").replace("_", " ")
