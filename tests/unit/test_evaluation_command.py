"""``scissorhands eval perplexity`` on a tiny model: its file, resuming, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from support.tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from scissorhands.evaluation import perplexity_run as runner
from scissorhands.evaluation.commands import evaluate
from scissorhands.policies.base import common_parameters
from scissorhands.policies.h2o import H2O

LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("evaluation")
    tokenizer = byte_level()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(made / "model")
    tokenizer.save_pretrained(made / "model")
    (made / "text.txt").write_text("It is a truth universally acknowledged. " * 20, encoding="utf-8")
    return made


def invoke(folder, *arguments, text="text.txt"):
    options = ["--model", folder / "model", "--text", folder / text, "--sequences", 3, "--length", LENGTH]
    return CliRunner().invoke(evaluate, [str(part) for part in ["perplexity", *options, *arguments]])


@pytest.fixture
def measured(monkeypatch):
    """Return the policies that are measured, as they are."""
    found = []
    measure = runner.measure

    def noted(model, grant, *rest):
        found.append((grant.policy, grant.preset, grant.layer_slots[0]))
        return measure(model, grant, *rest)

    monkeypatch.setattr(runner, "measure", noted)
    return found


def test_what_it_writes(folder, tmp_path):
    out = tmp_path / "out.json"
    result = invoke(folder, "--policy", "h2o", "--policy", "scissorhands:paper", "--budget", 0.5, "--json", out)
    assert result.exit_code == 0, result.output
    held = json.loads(out.read_text())
    assert set(held) == {"full", "rows", "settings", "environment"}
    assert held["full"]["perplexity"] > 1
    assert [(row["policy"], row["codec"], row["budget"]) for row in held["rows"]] == [
        ("h2o", "none", 0.5),
        ("scissorhands:paper", "none", 0.5),
    ]
    for row in held["rows"]:
        low, high = row["ci95"]
        assert low <= row["increase_percent"] <= high
        assert row["increase_percent"] == pytest.approx(100 * (row["perplexity"] / held["full"]["perplexity"] - 1))
        assert row["increase_percent_after_eviction"] != row["increase_percent"]
        sums, after = (np.array(row[name]) for name in ("loss_sums", "loss_sums_after_eviction"))
        assert len(sums) == len(after) == 3
        assert np.exp(sums.sum() / 3 / row["loss_count"]) == pytest.approx(row["perplexity"])
        assert row["loss_count"] - row["loss_count_after_eviction"] == row["first_eviction"]
        assert np.all(after < sums)
        assert row["first_eviction"] == row["slots"] == LENGTH // 2
    # Two heads in two layers; a float32 key and value of 8 and, for each slot, a position and its mass.
    assert held["rows"][0]["bytes_per_sequence"] == 48 * 2 * 2 * (2 * 8 * 4 + 8)
    assert held["rows"][0]["dtype"] == "float32"
    # Compression counts the same slots with keys and values in 16 bits, and all else as it is.
    assert held["rows"][0]["bytes_16_bit"] == 48 * 2 * 2 * (2 * 8 * 2 + 8)
    assert held["rows"][0]["compression"] == pytest.approx(96 * 2 * 8 * 2 / (48 * (2 * 8 * 2 + 8)))
    assert held["settings"]["sequences"] == 3
    assert held["settings"]["texts"][0]["name"] == "text.txt"
    assert "scissorhands:paper" in result.stdout
    assert "full" in result.stdout


def test_a_table_a_plot_and_a_line_of_progress_for_each_cell(folder, tmp_path):
    table, plot = tmp_path / "table.md", tmp_path / "plot.png"
    cells = ("--policy", "h2o", "--policy", "streaming", "--budget", 0.5)
    result = invoke(folder, *cells, "--markdown", table, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert sum(line.startswith(("| full", "| h2o", "| streaming")) for line in table.read_text().splitlines()) == 3
    assert plot.read_bytes()[:4] == b"\x89PNG"
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["full cache", "[1/2] h2o 0.5", "[2/2] streaming 0.5"]
    assert all("%" in line for line in lines[1:])


def test_cells_that_are_done_are_not_measured_again(folder, tmp_path, measured):
    out = tmp_path / "out.json"
    assert invoke(folder, "--policy", "h2o", "--budget", 0.5, "--json", out).exit_code == 0
    before = json.loads(out.read_text())
    assert measured == [("full", "default", LENGTH), ("h2o", "default", 48)]
    del measured[:]
    more = ("--policy", "h2o:default", "--policy", "streaming", "--budget", 0.5, "--budget", 0.5, "--json", out)
    result = invoke(folder, *more)
    assert result.exit_code == 0, result.output
    assert measured == [("streaming", "default", 48)]
    after = json.loads(out.read_text())
    assert after["rows"][0] == before["rows"][0]
    assert after["full"] == before["full"]
    assert len(after["rows"]) == 2
    del measured[:]
    invoke(folder, *more)
    assert measured == []


def test_a_run_that_was_stopped_keeps_its_cells(folder, tmp_path, measured, monkeypatch):
    out = tmp_path / "out.json"
    noted = runner.measure

    def stopped(model, grant, *rest):
        if grant.policy == "streaming":
            raise KeyboardInterrupt
        return noted(model, grant, *rest)

    arguments = ("--policy", "h2o", "--policy", "streaming", "--budget", 0.5, "--json", out)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "measure", stopped)
        assert invoke(folder, *arguments).exit_code != 0
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["h2o"]
    del measured[:]
    assert invoke(folder, *arguments).exit_code == 0
    assert [policy for policy, *_ in measured] == ["streaming"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_other_settings_are_measured_anew(folder, tmp_path, measured):
    out = tmp_path / "out.json"
    arguments = ("--policy", "h2o", "--budget", 0.5, "--json", out)
    invoke(folder, *arguments)
    del measured[:]
    result = invoke(folder, *arguments, "--length", 80)
    assert "other settings (length)" in result.stderr
    assert [policy for policy, *_ in measured] == ["full", "h2o"]
    assert json.loads(out.read_text())["settings"]["length"] == 80


def test_a_cell_of_a_policy_with_other_numbers_is_measured_again(folder, tmp_path, measured, monkeypatch):
    out = tmp_path / "out.json"
    arguments = ("--policy", "h2o", "--policy", "streaming", "--budget", 0.5, "--json", out)
    invoke(folder, *arguments)
    del measured[:]
    monkeypatch.setattr(H2O, "parameters", lambda _, slots: common_parameters(slots, recent=slots // 4))
    assert invoke(folder, *arguments).exit_code == 0
    assert [policy for policy, *_ in measured] == ["h2o"]
    rows = json.loads(out.read_text())["rows"]
    assert sorted(row["policy"] for row in rows) == ["h2o", "streaming"]
    assert "recent=12" in rows[1]["grant"]


def test_a_budget_that_evicts_nothing(folder, tmp_path):
    out = tmp_path / "out.json"
    assert invoke(folder, "--policy", "h2o", "--budget", 1, "--json", out).exit_code == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["increase_percent"] == 0
    assert row["first_eviction"] is row["increase_percent_after_eviction"] is row["ci95_after_eviction"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "h3o"), "--policy: there is no 'h3o'; allowed: scissorhands"),
        (("--policy", "h2o:paper"), "--policy: there is no 'h2o:paper'"),
        (("--policy", "full", "--budget", "0.5"), "--budget: policy full keeps every token"),
        (("--budget", "1.5"), "--budget: must be above 0 and at most 1"),
        (("--budget", "nan"), "--budget: must be a finite number"),
        (("--budget", "few"), "'--budget': 'few' is not a valid float"),
        (("--codec", "zip"), "--codec: unknown codec 'zip'; allowed: none, int8"),
        (("--codec", "kivi:2"), "--codec: kivi:2 cannot be resident: its rows are not independent"),
        (("--codec", "klt"), "--codec: klt:k4v4 needs a model's statistics"),
        (("--codec", "planned"), "--codec: planned needs a model's profile"),
        (("--codec", "int4", "--policy", "r-kv"), "--codec: policy r-kv reads keys and values"),
        (("--compression", "1"), "--compression: must be above 1"),
        (("--sequences", "40"), "--text: text.txt has 800 tokens"),
        (("--length", "129"), "--length: must be at most 128, the model's longest context"),
        (("--json", "/nowhere/out.json"), "--json: there is no folder /nowhere"),
        (("--text", "/nowhere"), "'--text': File '/nowhere' does not exist"),
        (("--device", "abacus"), "--device: 'abacus' cannot be used"),
        (("--model", "/nowhere"), "--model: cannot load '/nowhere'"),
    ],
)
def test_bad_usage_names_the_option(folder, arguments, message):
    result = invoke(folder, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_of_something_else_is_not_overwritten(folder, tmp_path, content):
    out = tmp_path / "out.json"
    out.write_text(content)
    result = invoke(folder, "--policy", "h2o", "--budget", 0.5, "--json", out)
    assert result.exit_code == 2
    assert "is not a result of this command; name another file" in result.stderr
    assert out.read_text() == content


@pytest.mark.parametrize("losses", ["AAAA", "not base 64", None])
def test_a_file_that_was_changed_is_not_resumed(folder, tmp_path, losses):
    out = tmp_path / "out.json"
    arguments = ("--policy", "h2o", "--budget", 0.5, "--json", out)
    invoke(folder, *arguments)
    held = json.loads(out.read_text())
    held["full"]["losses"] = losses
    out.write_text(json.dumps(held))
    result = invoke(folder, *arguments)
    assert result.exit_code == 2
    assert "is not a result of this command; name another file" in result.stderr


def test_the_help_needs_no_torch():
    code = (
        "import sys; from click.testing import CliRunner; from scissorhands.evaluation.commands import evaluate; "
        "found = [CliRunner().invoke(evaluate, [name, '--help']) for name in evaluate.commands]; "
        "assert len(found) > 3 and all(each.exit_code == 0 for each in found); "
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
