"""Every query of every panel and rule, asked of a real Prometheus that has scraped a running system."""

import math
import time

import pytest
from support.tiny_models import random_tokens
from support.tiny_worker import tiny_folder

from dashboards.asked import answers, panel_queries, rule_queries, rules
from dashboards.recording import recorded
from dashboards.traffic import ENVIRONMENT, OPTIONS, Scale, Traffic
from scissorhands_client import TokenIds

SCALE = Scale(lambda seed, tokens: TokenIds(tuple(random_tokens(tokens, seed=seed).tolist())), 130, 60, 48)
# So little that whole objects must go.
SPACE = {"SCISSORHANDS_MANAGER_STORE_HIGH_BYTES": "100000"}
SETTLE_SECONDS = 5


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A recorded run, and the times between which it ran."""
    folder = tmp_path_factory.mktemp("recording")
    with recorded(folder, tiny_folder(), OPTIONS, {**ENVIRONMENT, **SPACE, "OMP_NUM_THREADS": "1"}) as found:
        begin = time.time()
        time.sleep(2)  # Every counter is scraped before it moves.
        Traffic(found.state["worker"]["address"], SCALE).run()
        time.sleep(SETTLE_SECONDS)  # What is computed of the last rates.
        yield found.prometheus, begin, time.time()


def without_data(recording, asked, counts=lambda value: True):
    prometheus, begin, end = recording
    return "\n".join(
        f"{each.board}, {each.panel}: {each.expression}"
        for each in asked
        if not any(counts(value) for series in answers(prometheus, each, begin, end) for _, value in series.points)
    )


def test_every_panel_shows_data(recording):
    asked = panel_queries()
    assert len(asked) > 100
    assert not without_data(recording, asked, math.isfinite)


def test_what_rules_and_alerts_look_at_has_data(recording):
    asked = rule_queries()
    assert {each.panel for each in asked} == {rule.get("record") or rule["alert"] for _, rule in rules()}
    assert not without_data(recording, asked)


def test_every_rule_is_loaded_and_evaluated(recording):
    loaded = {rule["name"]: rule for rule in recording[0].rules()}
    assert loaded.keys() == {rule.get("record") or rule["alert"] for _, rule in rules()}
    for rule in loaded.values():
        assert (rule["health"], rule.get("lastError", "")) == ("ok", "")
    # Nothing was wrong for long enough. Objects go while others read them here, which is no wrong byte.
    alerts = [alert for rule in loaded.values() for alert in rule.get("alerts", ()) if alert["state"] == "firing"]
    assert not alerts
