"""The benchmark of decoding, on a tiny model and without kvpress, and how its ratios are made."""

import json

import pytest
from click.testing import CliRunner
from support.tiny_worker import tiny_folder

from benchmarks.decode import headline, main, ratios_of
from benchmarks.peers.decoding import Decoding, describe
from scissorhands.errors import InvalidRequestError


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decode")
    arguments = ["--model", str(tiny_folder()), "--context", "400", "--no-peers", "--rounds", "2", "--batch", "1"]
    arguments += ["--batch", "3", "--json", str(folder / "a.json"), "--plot", str(folder / "a.png")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "a.json").read_text())


def test_the_same_budget_is_held_by_all_that_hold_a_budget(found):
    held = {(row["batch"], row["case"]): row["peak_kv_bytes_a_row"] for row in found["rows"]}
    # Keys and values of 2 layers with 2 heads of 8 float32 numbers, and 8 bytes of evidence a slot.
    slot = 2 * 2 * (2 * 8 * 4)
    assert found["settings"]["slots"] == 80
    for count in (1, 3):
        assert held[count, "hf_full"] == 400 * slot
        assert held[count, "hf_budget"] == 80 * slot
        assert held[count, "limit"] == held[count, "budget"] == 80 * (slot + 2 * 2 * 8)


def test_every_ratio_is_told_by_batch_size_and_the_least_of_them_without(found):
    names = {"decode_over_limit", "decode_over_hf_budget", "decode_over_hf_full"}
    assert set(found["ratios"]) == {f"{name}{suffix}" for name in names for suffix in ("", "_1", "_3")}
    for name in names:
        assert found["ratios"][name] == min(found["ratios"][f"{name}_{count}"] for count in (1, 3))
    assert found["settings"]["synthetic_caches"] is True
    assert found["settings"]["grant"].startswith("scissorhands:default ")


def test_ratios_are_paired_and_those_over_kvpress_take_its_fastest_case():
    tokens = {
        "budget": [10.0, 20.0, 30.0], "limit": [20.0, 20.0, 20.0],
        "kvpress:knorm@16": [5.0, 5.0, 5.0], "kvpress:knorm@512": [10.0, 10.0, 40.0],
    }  # fmt: skip
    assert ratios_of(tokens) == {"decode_over_limit": 1.0, "decode_over_kvpress": 1.0}
    assert headline({"a_1": 2.0, "a_8": 1.0, "b_1": 3.0, "b_8": 4.0}, (1, 8)) == {"a": 1.0, "b": 3.0}


def test_a_short_interval_is_run_from_end_to_end_and_of_a_long_one_its_middle():
    short, long = (describe("knorm", every, 819, 8, 4) for every in (16, 512))
    assert (short["steps"], short["start"]) == (16, 819)
    assert (long["steps"], long["start"]) == (4, 819 + 256)
    for name in ("no such press", "quantized4"):
        with pytest.raises(InvalidRequestError, match="press"):
            describe(name, 16, 819, 1, 4)


def test_without_the_other_environment_nothing_is_started():
    with Decoding(None, "model", []) as decoding:
        assert decoding.peak_bytes == {}
