"""The profile of a decode step, on a tiny model, and how its ratios are made."""

import json

import pytest
import torch
from click.testing import CliRunner
from support.tiny_worker import tiny_folder

from benchmarks.profile_step import PARTS, main, profiles, ratios_of


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "a.json"
    arguments = ["--model", str(tiny_folder()), "--context", "400", "--rounds", "2", "--batch", "1", "--batch", "3"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


def test_the_parts_of_a_step_are_all_of_it(found):
    assert {(row["batch"], row["case"]) for row in found["rows"]} == {
        (count, case) for count in (1, 3) for case in ("limit", "equal", "budget", "hf_full")
    }
    for row in found["rows"]:
        assert set(row["parts"]) == {*PARTS, "model", "other"}
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"], rel=0.02)


def test_each_part_is_found_where_it_is_done_and_nowhere_else(found):
    evicting = {"snapshot", "plan", "compaction"}
    for row in found["rows"]:
        done = {part for part, seconds in row["parts"].items() if seconds > 0}
        assert {"weights", "model", "attention"} <= done
        assert evicting & done == (evicting if row["case"] in {"equal", "budget"} else set())
        assert ("places" in done) == (row["case"] != "hf_full")


def test_ratios_are_told_by_batch_size_and_the_least_of_them_without(found):
    names = {"budget_over_limit", "equal_over_limit", "budget_over_hf_full", "free_over_hf_full"}
    assert set(found["ratios"]) == {f"{name}{suffix}" for name in names for suffix in ("", "_1", "_3")}
    assert found["settings"]["slots"] == 80
    assert found["settings"]["grants"]["equal"].startswith("scissorhands:uniform ")
    assert "cpus" in found["environment"]


def test_ratios_are_paired_and_what_the_cache_takes_is_left_out_of_the_free_one():
    seconds = {"limit": [2.0, 4.0], "equal": [4.0, 8.0], "budget": [8.0, 16.0], "hf_full": [6.0, 12.0]}
    shares = {"weights": 0.3, "model": 0.1, "sampling": 0.05, "other": 0.05, "attention": 0.4, "append": 0.1}
    assert ratios_of(seconds, shares) == {
        "budget_over_limit": 0.25, "equal_over_limit": 0.5, "budget_over_hf_full": 0.75, "free_over_hf_full": 6.0,
    }  # fmt: skip


def test_what_was_timed_is_left_as_it_was():
    before = [(owner, name, getattr(owner, name)) for places in PARTS.values() for owner, name in places]
    taken = profiles({"work": lambda: torch.nn.Linear(64, 64)(torch.ones(64)).argmax()}, 1, PARTS)["work"]
    assert taken["weights"] > 0 < taken["other"]
    assert taken["plan"] == 0
    assert all(getattr(owner, name) is kept for owner, name, kept in before)
