"""``scissorhands eval oracle`` and ``persistence`` on a tiny model, and the oracle as a policy of ``perplexity``."""

import json

import pytest
from click.testing import CliRunner
from support.tiny_folder import make_folder

from scissorhands.evaluation.commands import evaluate
from scissorhands.policies import POLICIES

LENGTH = 96
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("clairvoyance"))


def invoke(folder, command, *arguments):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--sequences", 2, "--length", LENGTH]
    result = CliRunner().invoke(evaluate, [str(part) for part in [command, *options, *arguments]])
    assert result.exit_code == 0, result.output
    return result


def test_the_oracle_is_measured_like_a_policy(folder, tmp_path):
    out = tmp_path / "out.json"
    asked = ("--policy", "oracle", "--policy", "oracle:values", "--policy", "h2o", "--budget", 0.5, "--json", out)
    invoke(folder, "perplexity", *asked)
    rows = {row["policy"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"oracle", "oracle:values", "h2o"}
    losses = {name: row["loss_sums_after_eviction"] for name, row in rows.items()}
    assert losses["oracle"] != losses["h2o"]
    assert losses["oracle"] != losses["oracle:values"]
    for name in ("slots", "first_eviction", "bytes_per_sequence"):
        assert rows["oracle"][name] == rows["h2o"][name]
    # What is done is not measured again.
    invoke(folder, "perplexity", *asked)
    assert json.loads(out.read_text())["rows"] == list(rows.values())


def test_no_server_can_be_asked_for_the_oracle(folder):
    assert "oracle" not in POLICIES
    options = ["--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--policy", "oracle"]
    result = CliRunner().invoke(evaluate, ["agreement", *options])
    assert result.exit_code == 2
    assert "--policy: there is no 'oracle'" in result.stderr


def test_how_far_a_policy_is_from_the_oracle(folder, tmp_path):
    out, plot, markdown = (tmp_path / name for name in ("out.json", "out.png", "out.md"))
    outputs = ("--json", out, "--plot", plot, "--markdown", markdown)
    result = invoke(folder, "oracle", "--policy", "streaming", "--policy", "h2o", "--budget", 0.5, *outputs)
    rows = {row["policy"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["oracle", "streaming", "h2o"]
    for row in rows.values():
        heads = row["lost_percent_by_head"]
        assert [len(layer) for layer in heads] == [2, 2]
        assert row["lost_percent"] == pytest.approx(sum(map(sum, heads)) / 4)
        assert row["lost_percent"] == pytest.approx(sum(row["lost_percent_by_sequence"]) / 2)
    assert 0 < rows["oracle"]["lost_percent"] < min(rows[name]["lost_percent"] for name in ("streaming", "h2o"))
    assert "streaming" in result.stdout
    assert plot.read_bytes().startswith(PNG)
    assert "| oracle | 0.5 | 48 |" in markdown.read_text()


def test_nothing_is_lost_without_eviction(folder):
    options = ["--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--length", str(LENGTH)]
    result = CliRunner().invoke(evaluate, ["oracle", *options, "--sequences", "2", "--budget", "1"])
    assert result.exit_code == 2
    assert "--budget: nothing is evicted at 1; give a smaller share" in result.stderr


def test_persistence_with_trained_and_random_weights(folder, tmp_path):
    out, plot, markdown = (tmp_path / name for name in ("out.json", "out.png", "out.md"))
    asked = ("--policy", "h2o", "--budget", 0.5, "--json", out, "--plot", plot, "--markdown", markdown)
    result = invoke(folder, "persistence", *asked, "--random-weights", "--seed", 3)
    trained, random, change = json.loads(out.read_text())["rows"]
    assert (trained["of"], random["of"], change["of"]) == ("trained", "random", "change")
    assert [found["share"] for found in trained["sets"]] == [0, 0.1, 0.5]
    for found in (*trained["sets"], *random["sets"]):
        for name in ("ratio", "pivotal"):
            assert 0 <= found[f"{name}_percent"] <= 100
            assert [len(layer) for layer in found[f"{name}_percent_by_head"]] == [2, 2]
    assert random["sets"] != trained["sets"]
    assert sum(map(sum, change["histogram"]["counts_by_layer"])) == change["pairs"] > 0
    assert 0 < change["dropped_percent"] < 100
    assert "Persistence ratio" in result.stdout
    assert "Pivotal and evicted" in markdown.read_text()
    assert plot.read_bytes().startswith(PNG)
    # Equal seeds draw equal weights.
    again = tmp_path / "again.json"
    invoke(folder, "persistence", "--policy", "h2o", "--budget", 0.5, "--json", again, "--random-weights", "--seed", 3)
    assert json.loads(again.read_text())["rows"][1]["sets"] == random["sets"]
