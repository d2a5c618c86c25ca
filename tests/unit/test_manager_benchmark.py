"""The benchmark of a manager, with few and small sessions."""

import json
import os

import pytest
from click.testing import CliRunner

from benchmarks.manager import SHED, latency, main, ratios_of
from benchmarks.simulated_workers import PLANNED, Asked


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manager")
    before = os.sched_getaffinity(0)
    arguments = ["--sessions", "5", "--sessions", "1", "--layers", "2", "--kv-heads", "2", "--slots", "40"]
    arguments += ["--seconds", "0.5", "--core", str(min(before)), "--workers", "2"]
    arguments += ["--json", str(folder / "a.json"), "--plot", str(folder / "a.png")]
    # It fails if a snapshot is refused for any other reason than want of room.
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert os.sched_getaffinity(0) == before
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "a.json").read_text())


def test_all_numbers_of_sessions_are_measured_and_the_most_is_overloaded(found):
    assert [row["sessions"] for row in found["rows"]] == [1, 5]
    assert [("overload" in row, "recovered" in row) for row in found["rows"]] == [(False, False), (True, True)]
    for row in found["rows"]:
        assert row["plans_per_second"] > 0
        for load in row["loads"]:
            assert load[PLANNED] + load[SHED] == load["asked"] > 0
    assert {"plans_per_second", "p99_over_p50", "overload_shed_share", "bytes_a_session"} <= set(found["ratios"])


def test_only_plans_that_came_have_a_latency():
    asked = [Asked(None, 1.0, 1.0 + seconds, PLANNED) for seconds in (0.1, 0.2, 0.3)]
    found = latency([*asked, Asked(None, 1.0, 9.0, SHED)])
    assert (found[PLANNED], found[SHED], found["p50_seconds"]) == (3, 1, 0.2)


def test_the_worst_number_of_sessions_stands_for_the_run():
    def row(sessions, rate, p99, shed):
        loads = [{"load": load, "asked": 10, SHED: shed, "p50_seconds": 0.1, "p99_seconds": p99} for load in (0.5, 0.8)]
        return {"sessions": sessions, "plans_per_second": rate, "bytes_a_session": 7, "loads": loads}

    ratios = ratios_of([row(1, 300, 0.2, 2), row(9, 400, 0.1, 0)])
    assert ratios == {
        "plans_per_second": 300, "p99_over_p50": 2.0, "shed_below_80_percent": 0.2, "bytes_a_session": 7,
    }  # fmt: skip
