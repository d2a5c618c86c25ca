"""Recording rules and alerts: valid, true to the code, tried on good and bad series, each with a runbook entry."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from dashboards.asked import RULES, operands, panel_queries, rules
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.tls import TlsMetrics
from scissorhands_server.worker.metrics import WorkerMetrics

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = ROOT / "docs" / "runbook.md"
SEVERITIES = {"critical", "warning", "info"}
FILES = sorted(str(path) for path in RULES.glob("*.yml"))
ALERTS = {rule["alert"]: rule for _, rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for _, rule in rules() if "record" in rule}
W, M = "scissorhands_worker_", "scissorhands_manager_"
# A counter that grows by this a minute, a gauge that stays.
UP, STILL = "0+{}x40", "{}x40"


def counter(name, a_minute, **labels):
    return name, labels, UP.format(a_minute)


def gauge(name, value, **labels):
    return name, labels, STILL.format(value)


def requests(result, bad):
    return [counter(f"{W}requests_total", bad, result=result), counter(f"{W}requests_total", 100, result="eos")]


def latency(name, seconds, **labels):
    """A histogram all of whose observations lie in one bucket."""
    edges = (0.1, 0.5, 5, 120)
    found = [counter(f"{name}_bucket", 100 if edge >= seconds else 0, le=edge, **labels) for edge in edges]
    return [*found, counter(f"{name}_bucket", 100, le="+Inf", **labels)]


def mean(name, value):
    return [counter(f"{W}{name}_sum", value * 100), counter(f"{W}{name}_count", 100)]


# The series of one process at which an alert fires, and those of another at which it is silent.
CASES = {
    "ScissorhandsTargetDown": ([gauge("up", 0)], [gauge("up", 1)]),
    "ScissorhandsManagerUnreachable": ([gauge(f"{W}manager_up", 0)], [gauge(f"{W}manager_up", 1)]),
    "ScissorhandsStoreUnreachable": ([gauge(f"{M}store_up", 0)], [gauge(f"{M}store_up", 1)]),
    "ScissorhandsRequestsFail": (requests("error", 3), requests("refused", 50)),
    "ScissorhandsOverloaded": (requests("overloaded", 10), requests("overloaded", 2)),
    "ScissorhandsQueueFilling": (
        [gauge(f"{W}queue_requests", 60), gauge(f"{W}queue_capacity_requests", 64)],
        [gauge(f"{W}queue_requests", 30), gauge(f"{W}queue_capacity_requests", 64)],
    ),
    "ScissorhandsFirstTokenSlow": (
        latency(f"{W}time_to_first_token_seconds", 60),
        latency(f"{W}time_to_first_token_seconds", 1),
    ),
    "ScissorhandsTokensSlow": (
        latency(f"{W}inter_token_latency_seconds", 2),
        latency(f"{W}inter_token_latency_seconds", 0.2),
    ),
    "ScissorhandsBudgetExceeded": (
        [gauge(f"{W}cache_slots", 257), gauge(f"{W}cache_budget_slots", 256)],
        [gauge(f"{W}cache_slots", 256), gauge(f"{W}cache_budget_slots", 256)],
    ),
    "ScissorhandsAttentionDropped": (
        mean("recent_attention_dropped_ratio", 0.2),
        mean("recent_attention_dropped_ratio", 0.02),
    ),
    "ScissorhandsImportanceDoesNotPersist": (mean("persistence_ratio", 0.5), mean("persistence_ratio", 0.8)),
    "ScissorhandsPrefillStalled": (
        [counter(f"{W}prefill_stall_seconds_total", 30)],
        [counter(f"{W}prefill_stall_seconds_total", 3)],
    ),
    "ScissorhandsPlansShed": (
        [counter(f"{M}plans_total", 5, result="shed"), counter(f"{M}plans_total", 100, result="computed")],
        [counter(f"{M}plans_total", 0, result="shed"), counter(f"{M}plans_total", 100, result="computed")],
    ),
    "ScissorhandsSegmentsDropped": (
        [counter(f"{W}segments_total", 10, result="dropped"), counter(f"{W}segments_total", 90, result="offloaded")],
        [counter(f"{W}segments_total", 1, result="dropped"), counter(f"{W}segments_total", 99, result="offloaded")],
    ),
    "ScissorhandsRowsNotResumed": (
        [counter(f"{W}resumes_total", 30, result="late"), counter(f"{W}resumes_total", 70, result="resumed")],
        [counter(f"{W}resumes_total", 30, result="new"), counter(f"{W}resumes_total", 70, result="resumed")],
    ),
    "ScissorhandsCorruptData": tuple(
        [
            counter(f"{W}resumes_total", 0, result="corrupt"),
            counter(f"{W}prefix_lookups_total", many, result="corrupt"),
            counter(f"{W}recall_misses_total", 0, reason="corrupt"),
        ]
        for many in (1, 0)
    ),
    "ScissorhandsStoreErrors": (
        [counter(f"{M}store_errors_total", 60, reason="timeout")],
        [counter(f"{M}store_errors_total", 1, reason="timeout")],
    ),
    "ScissorhandsStoreSlow": (
        latency(f"{M}store_operation_seconds", 1, method="put"),
        latency(f"{M}store_operation_seconds", 0.01, method="put"),
    ),
    "ScissorhandsCertificateEnds": (
        [gauge(f"{M}certificate_left_seconds", 500_000)],
        [gauge(f"{M}certificate_left_seconds", 700_000)],
    ),
    "ScissorhandsStoreNearlyFull": (
        [gauge(f"{M}store_memory_bytes", 99), gauge(f"{M}store_most_memory_bytes", 100)],
        # Without a bound there is nothing to fill.
        [gauge(f"{M}store_memory_bytes", 99), gauge(f"{M}store_most_memory_bytes", 0)],
    ),
    "ScissorhandsNoRoomInStore": (
        [counter(f"{M}quota_refusals_total", 1, kind="row")],
        [counter(f"{M}quota_refusals_total", 0, kind="row")],
    ),
}


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_valid():
    checked = promtool("check", "rules", *FILES)
    assert f"{len(ALERTS)} rules found" in checked
    assert len(FILES) == 2


def test_every_alert_fires_on_a_bad_series_and_is_silent_on_a_good_one(tmp_path):
    assert CASES.keys() == ALERTS.keys()
    tests = []
    for name, sides in CASES.items():
        rule = ALERTS[name]
        job = "scissorhands-manager" if M in str(sides) else "scissorhands-worker"
        series = [
            {"series": f"{metric}{{{_labels({**labels, 'job': job, 'instance': side})}}}", "values": values}
            for side, found in zip(("bad", "good"), sides, strict=True)
            for metric, labels, values in found
        ]
        expected = {
            "exp_labels": {"severity": rule["labels"]["severity"], "job": job, "instance": "bad"},
            "exp_annotations": {
                key: text.replace("{{ $labels.instance }}", "bad") for key, text in rule["annotations"].items()
            },
        }
        asked = [{"eval_time": "30m", "alertname": name, "exp_alerts": [expected]}]
        if "for" in rule:
            asked.append({"eval_time": "0m", "alertname": name, "exp_alerts": []})
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": asked})
    path = tmp_path / "alerts_test.yml"
    path.write_text(yaml.safe_dump({"rule_files": FILES, "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


def _labels(labels):
    return ", ".join(f'{name}="{value}"' for name, value in labels.items())


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_how_bad_it_is_and_where_to_read_on(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_the_runbook_has_an_entry_for_each_alert_and_no_other():
    text = RUNBOOK.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(ALERTS)
    for entry in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        assert re.findall(r"^\*\*(.+?)\.\*\*", entry, re.MULTILINE) == ["It means", "Look at", "Do"]


def test_the_panels_that_the_runbook_names_exist():
    named = {name.replace("\n", " ") for name in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", RUNBOOK.read_text())}
    assert len(named) > 15
    assert named <= {each.panel for each in panel_queries()}


def test_rules_look_at_series_that_exist():
    registry = CollectorRegistry()
    WorkerMetrics(registry, "model", rows=1, queue=1)
    ManagerMetrics(registry)
    for server in ("worker", "manager"):
        TlsMetrics(registry, server)
    labels: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    for _, rule in rules():
        text = re.sub(r"[a-z_]+:scissorhands_\w+:\w+", "", rule["expr"])
        for name, selector in re.findall(r"(scissorhands_\w+)(?:\{([^}]*)\})?", text):
            assert name in labels, rule["expr"]
            assert set(re.findall(r"(\w+)(?:=|!)", selector)) <= labels[name], rule["expr"]
        assert set(re.findall(r"[a-z_]+:scissorhands_\w+:\w+", rule["expr"])) <= RECORDED


def test_an_alert_compares_what_is_recorded_with_numbers():
    assert operands('up{job=~"a"} == 0 and on (instance) b:c:d > 0.5') == ['up{job=~"a"}', "b:c:d"]
    with pytest.raises(ValueError, match="an alert compares"):
        operands("rate(a[5m]) > b")
