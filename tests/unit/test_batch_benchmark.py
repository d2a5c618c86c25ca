"""The benchmark of batches at equal memory, on a tiny model."""

import json

import pytest
from click.testing import CliRunner
from support.tiny_worker import tiny_folder

from benchmarks.batch import main


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    arguments = [
        "--model",
        str(tiny_folder()),
        "--length",
        "256",
        "--full-rows",
        "2",
        "--rounds",
        "2",
        "--budget",
        "0.25",
    ]
    arguments += ["--size", "1", "--size", "3", "--json", str(folder / "a.json"), "--plot", str(folder / "a.png")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "a.json").read_text())


def test_rows_are_as_many_as_fit_and_every_byte_is_counted(found):
    memory = found["settings"]["memory_bytes"]
    # Keys and values of 2 layers with 2 heads of 8 float32 numbers, of 2 sequences of 256 tokens.
    assert memory == 2 * (2 * 2 * 2 * 8 * 4) * 256
    rows = {row["case"]: row for row in found["rows"]}
    assert rows["full"]["rows"] == 2
    for case in ("budget", "4bit"):
        assert rows[case]["bytes"] <= memory < rows[case]["bytes"] + rows[case]["row_bytes"]
    assert rows["4bit"]["rows"] > rows["budget"]["rows"] > 2 * rows["full"]["rows"]
    for row in rows.values():
        assert row["allocated_bytes_a_row"] == row["row_bytes"]


def test_what_stands_for_the_run_is_told(found):
    assert set(found["ratios"]) == {"tokens_at_equal_memory", "tokens_at_equal_memory_4bit"}
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert found["settings"]["synthetic_caches"] is True
    assert "load_average" in found["environment"]
    for row in found["rows"]:
        assert {"weights", "attention", "eviction", "other"} == set(row["shares"])
        assert sum(row["shares"].values()) == pytest.approx(1, abs=0.01)
    assert {(each["case"], each["rows"]) for each in found["curves"]} >= {("budget", 1), ("budget", 3), ("full", 1)}
    assert ("full", 3) not in {(each["case"], each["rows"]) for each in found["curves"]}
