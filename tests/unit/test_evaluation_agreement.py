"""Answers under a budget against those of the full cache."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.engine_path import EnginePath
from support.tiny_folder import make_folder
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.evaluation import agreement_run
from scissorhands.evaluation.agreement import agree, work
from scissorhands.evaluation.commands import evaluate
from scissorhands.evaluation.decoding import answers
from scissorhands.grant import PolicyRequest, grant

PROMPT = 70
NEW = 20
TOTAL = PROMPT + NEW


@pytest.fixture(scope="module")
def engine():
    return EnginePath(tiny_model("llama_grouped"))


@pytest.fixture(scope="module")
def prompts():
    return torch.stack([random_tokens(PROMPT, seed) for seed in range(6)]).numpy()


def granted(engine, policy, fraction):
    return grant(BudgetRequest.fraction(fraction), PolicyRequest(policy), engine.shape, TOTAL)


def test_greedy_answers_are_those_of_the_engine_row_by_row(engine, prompts):
    few = granted(engine, "h2o", 0.4)
    found = answers(engine.model, few, prompts.tolist(), NEW)
    for prompt, answer in zip(prompts, found, strict=True):
        row = engine.cache.add_row(few, limit=TOTAL - 1)
        logits = engine.read(row, torch.from_numpy(prompt))[-1]
        for token in answer[:-1]:
            assert logits.argmax() == token
            logits = engine.decode([row], torch.tensor([token]))[0]
        assert logits.argmax() == answer[-1]
        assert row.epoch >= 2
        engine.cache.remove_row(row)


def test_a_budget_that_evicts_nothing_agrees_in_all(engine, prompts):
    full = granted(engine, "full", 1.0)
    expected = answers(engine.model, full, prompts.tolist(), NEW)
    told = []
    found = agree(engine.model, granted(engine, "h2o", 1.0), full, prompts, expected, told.append)
    assert found.nats.max() < 1e-9
    assert found.same.all()
    assert found.equal.all()
    assert found.first_divergence == [None] * 6
    assert sum(told) == work(prompts, NEW) * 2 // 3


def test_what_a_budget_changes(engine, prompts):
    full, few = granted(engine, "full", 1.0), granted(engine, "streaming", 0.3)
    expected = answers(engine.model, full, prompts.tolist(), NEW)
    found = agree(engine.model, few, full, prompts, expected)
    own = answers(engine.model, few, prompts.tolist(), NEW)
    assert found.nats.shape == (6, NEW)
    assert found.nats.min() > 0
    assert np.array_equal(found.equal, own == expected)
    firsts = [None if row.all() else int(np.argmin(row)) for row in own == expected]
    assert found.first_divergence == firsts
    assert any(first is not None for first in firsts)
    # Along the full cache's answer, by hand for one prompt.
    rows = [engine.cache.add_row(each, limit=TOTAL - 1) for each in (few, full)]
    logits = [engine.read(row, torch.from_numpy(prompts[0]))[-1].double().log_softmax(-1) for row in rows]
    for index in range(NEW):
        nats = (logits[1].exp() * (logits[1] - logits[0])).sum()
        assert found.nats[0, index] == pytest.approx(float(nats), rel=1e-3, abs=1e-6)
        assert found.same[0, index] == (logits[0].argmax() == logits[1].argmax())
        token = torch.tensor([expected[0, index]])
        logits = [engine.decode([row], token)[0].double().log_softmax(-1) for row in rows]
    for row in rows:
        engine.cache.remove_row(row)


def test_the_command_and_its_resuming(tmp_path, monkeypatch):
    folder, out = make_folder(tmp_path), tmp_path / "out.json"
    measured = []
    monkeypatch.setattr(agreement_run, "agree", lambda *given: measured.append(given[1].policy) or agree(*given))

    def invoke(*more):
        options = ["--model", folder / "model", "--text", folder / "text.txt", "--sequences", 3, "--length", 96]
        asked = ["agreement", *options, "--new-tokens", 16, "--budget", 0.4, "--json", out, *more]
        return CliRunner().invoke(evaluate, [str(part) for part in asked])

    result = invoke("--policy", "h2o", "--markdown", tmp_path / "table.md")
    assert result.exit_code == 0, result.output
    held = json.loads(out.read_text())
    (row,) = held["rows"]
    assert row["slots"] == 38
    assert row["compression"] == pytest.approx(96 * 2 * 8 * 2 / (38 * (2 * 8 * 2 + 8)))
    assert len(row["first_divergence"]) == len(row["kl_nats_by_sequence"]) == 3
    assert row["kl_nats"] == pytest.approx(np.mean(row["kl_nats_by_sequence"]))
    assert row["kl_nats_ci95"][0] <= row["kl_nats"] <= row["kl_nats_ci95"][1]
    assert np.array(held["full"]["tokens"]).shape == (3, 16)
    assert "| h2o | 0.4 |" in (tmp_path / "table.md").read_text()
    assert invoke("--policy", "h2o", "--policy", "streaming").exit_code == 0
    assert measured == ["h2o", "streaming"]
    assert json.loads(out.read_text())["rows"][0] == row
    refused = invoke("--new-tokens", 96)
    assert refused.exit_code == 2
    assert "--new-tokens: must be below the length (96), got 96" in refused.stderr
