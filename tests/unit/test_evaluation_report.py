"""``scissorhands eval report``: files side by side, what is best at a budget, and what is noise."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from scissorhands.evaluation.commands import evaluate
from scissorhands.evaluation.report import entries, verdicts
from scissorhands.evaluation.results import Results

SETTINGS = {"weights_sha256": "ab", "texts": [{"name": "a.txt", "sha256": "cd"}], "sequences": 8, "length": 101}
# Sequences differ greatly from each other, as texts do.
FULL = np.linspace(2.0, 4.0, 8)


def row(policy, excess, budget=0.2, **more):
    """Return a row whose sequences lose ``excess`` [8] nats more than with the full cache."""
    mean = FULL + excess
    percent = float(100 * np.expm1(np.mean(excess)))
    return {
        "policy": policy,
        "codec": "none",
        "budget": budget,
        "bytes_16_bit": int(budget * 2**20),
        "compression": 1 / budget,
        "perplexity": float(np.exp(mean.mean())),
        "increase_percent": percent,
        "ci95": [percent - 1, percent + 1],
        "increase_percent_after_eviction": percent,
        "ci95_after_eviction": [percent - 1, percent + 1],
        "loss_sums": (mean * 100).tolist(),
        "loss_count": 100,
        **more,
    }


def full(shift=0.0):
    return {"perplexity": float(np.exp(FULL.mean())), "loss_sums": ((FULL + shift) * 100).tolist(), "loss_count": 100}


def write(path, rows, reference=None, **settings):
    Results({**SETTINGS, **settings}, {}, reference or full(), rows).write(path)
    return path


def report(*arguments):
    return CliRunner().invoke(evaluate, ["report", *map(str, arguments)])


# One sequence less, another more than the best: noise. The same more of each, however little: none.
EVEN = np.full(8, 0.02)
UNEVEN = EVEN + np.array([0.01, -0.01] * 4) + 0.001
WORSE = EVEN + 0.002


def test_the_best_of_each_budget_and_what_is_noise():
    rows = [row("h2o", EVEN), row("tova", UNEVEN), row("streaming", WORSE), row("oracle", EVEN / 2)]
    rows.append(row("streaming", WORSE, budget=0.5))
    found = entries([Results(SETTINGS, {}, full(), rows)])
    named = {(entry.name, entry.row["budget"]): verdict for entry, verdict in zip(found, verdicts(found), strict=True)}
    assert list(named) == [("streaming", 0.5), ("oracle", 0.2), ("h2o", 0.2), ("tova", 0.2), ("streaming", 0.2)]
    assert named["oracle", 0.2] is None
    assert named["h2o", 0.2].best
    assert named["streaming", 0.5].best
    assert named["tova", 0.2].noise
    assert not named["streaming", 0.2].noise
    assert named["streaming", 0.2].percent == pytest.approx(100 * np.expm1(0.002))
    assert named["streaming", 0.2].interval == pytest.approx((100 * np.expm1(0.002),) * 2)


def test_budgets_of_about_equal_bytes_are_compared():
    budgets = (0.2, 0.1968, 0.19)
    rows = [row("h2o", excess, budget) for excess, budget in zip((WORSE, EVEN, EVEN), budgets, strict=True)]
    found = verdicts(entries([Results(SETTINGS, {}, full(), rows)]))
    assert [verdict.best for verdict in found] == [True, False, True]
    assert found[1].percent == pytest.approx(100 * np.expm1(0.002))


def test_packed_slots_are_compared_by_bytes():
    rows = [
        row("h2o", WORSE, 0.3, codec="int4", compression=10.1),
        row("tova", EVEN, 0.1, codec="klt:4", compression=10.0),
        row("h2o", EVEN, 0.3),
        row("full", EVEN, 1.0, codec="int4", compression=3.2),
    ]
    found = entries([Results(SETTINGS, {}, full(), rows)])
    assert [entry.name for entry in found] == ["full, int4", "h2o", "tova, klt:4", "h2o, int4"]
    assert [verdict.best for verdict in verdicts(found)] == [True, True, True, False]


def test_few_sequences_tell_nothing():
    means = {"h2o": np.full(5, 3.0), "streaming": np.full(5, 3.1)}
    rows = [row(policy, EVEN, loss_sums=(mean * 100).tolist()) for policy, mean in means.items()]
    found = entries([Results(SETTINGS, {}, {"loss_sums": [290.0] * 5, "loss_count": 100}, rows)])
    best, other = verdicts(found)
    assert best is not None
    assert best.best
    assert str(other) == "+10.52 % (+10.52 to +10.52), too few sequences to tell"


def test_files_of_two_programs(tmp_path):
    ours = write(tmp_path / "ours.json", [row("h2o", EVEN)])
    # The other program's numbers are off by a little everywhere, its full cache's too.
    shifted = row("kvpress:snapkv", WORSE + 0.01, source="kvpress 0.3")
    theirs = write(tmp_path / "theirs.json", [shifted], full(0.01), dtype="float32")
    result = report(ours, theirs, "--markdown", tmp_path / "table.md", "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.output
    assert "snapkv, kvpress 0.3" in result.stdout
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.count("|") for line in lines] == [9] * 5
    assert lines[3].startswith("| h2o | 0.2 | 0.20 | 5.00x |")
    assert lines[3].endswith("| best |")
    assert lines[4].startswith("| snapkv, kvpress 0.3 |")
    assert lines[4].endswith("| +0.20 % (+0.20 to +0.20) |")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "other", [{"weights_sha256": "ef"}, {"sequences": 4}, {"length": 50}, {"texts": [{"name": "a.txt", "sha256": "0"}]}]
)
def test_other_settings_are_refused(tmp_path, other):
    paths = [write(tmp_path / "a.json", [row("h2o", EVEN)]), write(tmp_path / "b.json", [row("tova", EVEN)], **other)]
    result = report(*paths)
    assert result.exit_code == 2
    assert f"other settings ({next(iter(other))})" in result.stderr


def test_what_cannot_be_compared_is_refused(tmp_path):
    old = row("h2o", EVEN)
    del old["loss_sums"]
    result = report(write(tmp_path / "a.json", [old]))
    assert result.exit_code == 2
    assert "the row of 'h2o' cannot be compared: no field 'loss_sums'; measure it again" in result.stderr
    (tmp_path / "b.json").write_text(json.dumps({"rows": []}))
    assert "is not a result" in report(tmp_path / "b.json").stderr
    assert "--plot: there is no folder" in report(tmp_path / "a.json", "--plot", "/nowhere/plot.png").stderr
