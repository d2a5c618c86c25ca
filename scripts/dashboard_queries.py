"""What the panels of the Grafana dashboard are made of: queries, graphs and lights."""

from dataclasses import dataclass

WORKER = "scissorhands_worker_"
MANAGER = "scissorhands_manager_"


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


def summed(metric: str, *labels: str) -> Query:
    """Return the sum of a gauge over all processes, one series for each value of the labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or _words(metric)
    return Query(f"sum{by} ({metric})", legend)


def rate(metric: str, *labels: str, prefix: str = "") -> Query:
    """Return the increase per second of a counter, one series for each value of the labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or _words(metric)
    return Query(f"sum{by} (rate({metric}[$__rate_interval]))", f"{prefix}{legend}")


def quantiles(metric: str, *labels: str) -> tuple[Query, ...]:
    """Return the median, the 90th and the 99th percentile of a histogram."""
    by = ", ".join(("le", *labels))
    suffix = "".join(f" {{{{{label}}}}}" for label in labels)
    return tuple(
        Query(f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket[$__rate_interval])))", f"{name}{suffix}")
        for q, name in ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %"))
    )


def busy(query: Query) -> Query:
    """Return a query without its series that are zero, where there are too many to show."""
    return Query(f"{query.expression} > 0", query.legend)


def share(part: str, whole: str, legend: str) -> Query:
    """Return one counter's increase over another's; nothing is drawn while the other stands still."""
    return Query(f"sum(rate({part}[$__rate_interval])) / (sum(rate({whole}[$__rate_interval])) > 0)", legend)


def mean(metric: str) -> Query:
    """Return the mean of a histogram."""
    return share(f"{metric}_sum", f"{metric}_count", "mean")


def _words(metric: str) -> str:
    """Return a metric's name without prefix and suffix, in words."""
    name = metric.removeprefix(WORKER).removeprefix(MANAGER)
    return name.removesuffix("_total").replace("_", " ")
