"""The benchmark of the service against a loop, on a tiny model."""

import json

import click
import pytest
from click.testing import CliRunner
from support.tiny_worker import tiny_folder

from benchmarks.service import main, together
from benchmarks.serving import Answer


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    (folder / "text").write_text("It is a truth universally acknowledged. " * 20)
    arguments = ["--model", str(tiny_folder()), "--text", str(folder / "text"), "--rows", "2", "--context", "200"]
    arguments += ["--answer", "300", "--rounds", "2", "--json", str(folder / "a.json"), "--plot", str(folder / "a.png")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    # It fails if an answer through the service is not that of the loop.
    assert result.exit_code == 0, result.output
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "a.json").read_text())


def test_what_stands_for_the_run_is_told(found):
    ratios = found["ratios"]
    assert set(ratios) == {
        "service_over_loop", "service_over_loop_20ms", "stall_share", "prefill_stall_share", "prefill_stall_share_near",
    }  # fmt: skip
    assert ratios["service_over_loop"] > 0
    assert ratios["service_over_loop_20ms"] > 0
    assert 0 < ratios["prefill_stall_share"] < 1
    assert {name: len(tokens) for name, tokens in found["tokens_per_second"].items()} == dict.fromkeys(
        ("loop", "near", "far"), 2
    )


def test_tokens_are_counted_while_all_rows_decode():
    first, second = Answer([1] * 4, 0.0, [1.0, 2.0, 3.0, 4.0], None), Answer([1] * 3, 0.0, [2.0, 3.0, 6.0], None)
    assert together([first, second]) == (3, 2.0)
    with pytest.raises(click.ClickException, match="--answer"):
        together([first, Answer([1], 0.0, [5.0], None)])
