"""What dashboards and rules ask Prometheus, read from the committed files."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from dashboards.recording import Prometheus, Series

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DASHBOARDS = DOCKER / "grafana" / "dashboards"
RULES = DOCKER / "prometheus" / "rules"
# What Grafana makes of the variable with a scrape every second: four of them, and one for good measure.
RATE_INTERVAL = "5s"
# An alert compares what is recorded with numbers; only recording rules compute.
_COMPARISON = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*(?:bool\s+)?-?[\d.e-]+\s*$")


@dataclass(frozen=True)
class Asked:
    """One query.

    Args:
        board: Title of the dashboard, or name of the group of rules.
        panel: Title of the panel, or name of the rule.
        unit: Unit of its values as Grafana names it; empty for rules.
        legend: Template of its series' names; empty for rules.
        expression: PromQL in which every variable is filled in, with all its values.
    """

    board: str
    panel: str
    unit: str
    legend: str
    expression: str


def panel_queries() -> list[Asked]:
    """Return the queries of all panels of all dashboards."""
    found: list[Asked] = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(path.read_text())
        variables = [each["name"] for each in board["templating"]["list"] if each["type"] == "query"]
        for panel in board["panels"]:
            unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
            found += (
                Asked(board["title"], panel["title"], unit, target["legendFormat"], _filled(target["expr"], variables))
                for target in panel.get("targets", ())
            )
    return found


def rule_queries() -> list[Asked]:
    """Return what rules look at: the expressions of those that record, and both sides' series of those that alert."""
    return [
        Asked(group["name"], rule.get("record") or rule["alert"], "", "", expression)
        for group, rule in rules()
        for expression in ([rule["expr"]] if "record" in rule else operands(rule["expr"]))
    ]


def rules() -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Return each rule with its group."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from ((group, rule) for rule in group["rules"])


def operands(alert: str) -> list[str]:
    """Return what an alert compares with numbers.

    Raises:
        ValueError: A part of it is no such comparison.
    """
    found = []
    for part in re.split(r"\s+(?:and|or|unless)\s+(?:on\s*\([^)]*\)\s*)?", alert):
        operand, compared = _COMPARISON.subn("", part)
        if not compared:
            raise ValueError(f"an alert compares a series with a number, but not here: {part}")
        found.append(operand.strip())
    return found


def answers(prometheus: Prometheus, asked: Asked, begin: float, end: float) -> list[Series]:
    """Return what a query gives over a time, a value a second."""
    return prometheus.over(asked.expression, begin, end, 1.0)


def _filled(expression: str, variables: list[str]) -> str:
    for name in variables:
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", RATE_INTERVAL)
