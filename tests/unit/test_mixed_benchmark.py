"""The benchmark of long prompts among short ones, on a tiny model."""

import json

import pytest
from click.testing import CliRunner
from support.tiny_worker import tiny_folder

from benchmarks.mixed import main, spread, summary
from benchmarks.serving import Answer


def test_answers_together_are_those_alone(tmp_path):
    (tmp_path / "text").write_text("It is a truth universally acknowledged. " * 40)
    arguments = ["--model", str(tiny_folder()), "--text", str(tmp_path / "text"), "--clients", "3", "--requests", "2"]
    arguments += ["--shortest", "20", "--longest", "300", "--answer", "40"]
    arguments += ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    # It fails if an answer is another one alone.
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert [len(own) for own in found["gaps"]] == [39] * 6
    assert found["ratios"]["p99_over_median"] >= 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_are_spread_over_all_clients():
    lengths = spread(50, 3000, 32)
    assert (min(lengths), max(lengths), len(lengths)) == (50, 3000, 32)
    assert lengths != sorted(lengths)
    assert sum(length < 387 for length in lengths) == 16


def test_times_between_tokens_are_those_within_answers():
    found = summary([Answer([1, 2, 3], 0.0, [1.0, 2.0, 4.0], None), Answer([1, 2], 1.0, [8.0, 9.0], None)])
    assert found["gaps"] == [[1.0, 2.0], [1.0]]
    assert found["ratios"]["longest_over_median"] == 2.0
    assert found["figures"]["first_token_median_seconds"] == 4.0
    assert found["figures"]["tokens_per_second"] == pytest.approx(5 / 9, abs=0.01)
