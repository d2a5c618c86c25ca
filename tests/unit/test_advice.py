"""The smallest budget within a wanted loss: how it is found, what is said of it, and the command on a tiny model."""

import json

import pytest
import torch
from click.testing import CliRunner
from support.tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from scissorhands.evaluation import advise_run
from scissorhands.evaluation.advice import Advice, paste, sequences_needed, smallest_within
from scissorhands.evaluation.commands.advise import BUDGETS, command


@pytest.mark.parametrize("smallest", [*BUDGETS, None])
def test_bisection_finds_the_smallest_budget_with_few_questions(smallest):
    asked = []

    def within(budget):
        asked.append(budget)
        return smallest is not None and budget >= smallest

    assert smallest_within(BUDGETS, within) == smallest
    assert len(asked) == len(set(asked)) <= 4


def row(budget, loss, low=None, high=None, size=1_000_000):
    interval = None if low is None else [low, high]
    return {
        "policy": "h2o",
        "budget": budget,
        "bytes_per_sequence": size,
        "compression": 4.0,
        "increase_percent_after_eviction": loss,
        "ci95_after_eviction": interval,
    }


def said(*rows, best, wanted=1.0, sequences=8):
    advice = Advice("h2o", wanted, sequences, 5_000_000, rows, best)
    return " ".join(advice.lines())


def test_a_certain_answer_says_so():
    text = said(row(0.1, 3.0, 2.0, 4.0), best := row(0.2, 0.5, 0.3, 0.7), best=best)
    assert "a budget of 0.2 changes perplexity by +0.50 % (+0.30 to +0.70) after the first eviction." in text
    assert "1.0 MB instead of 5.0 MB: 4.0 MB less, 80%." in text
    assert "The whole 95 % interval is within 1 %." in text
    assert "may be" not in text


def test_a_wide_interval_says_how_many_sequences_would_do():
    # The distance of 1.0 from the measured loss to its upper end must shrink to 0.5, so four times as many.
    assert sequences_needed(0.5, 1.5, 1.0, 8) == 32
    text = said(row(0.1, 1.2, 0.9, 1.5), best := row(0.2, 0.5, -0.5, 1.5), best=best)
    assert "The 95 % interval reaches +1.50 %, so that the loss may be above 1 %; about 32 sequences" in text
    assert "A budget of 0.1 changed it by +1.20 % (+0.90 to +1.50), and may be within, too." in text


@pytest.mark.parametrize("loss", [1.0, 0.9999])
def test_no_number_of_sequences_is_promised_where_the_loss_is_the_limit(loss):
    assert "too close" in said(best := row(0.2, loss, 0.5, 2.0), best=best)


def test_one_sequence_none_evicted_and_nothing_within_are_told_as_they_are():
    assert "One sequence tells nothing" in said(best := row(0.2, 0.5), best=best, sequences=1)
    assert "take this as a first look" in said(best := row(0.2, 0.5, 0.4, 0.6), best=best, sequences=7)
    assert "first look" not in said(best, best=best)
    assert "Nothing was evicted" in said(best := row(0.2, None), best=best)
    assert "keep every token" in said(row(0.8, 2.0, 1.0, 3.0), best=None)


def test_what_to_paste_names_policy_and_budget():
    lines = list(paste(row(0.075, 0.5)))
    assert lines[0] == "scissorhands generate --policy h2o --budget 0.075 ..."
    assert "--default-budget 0.075" in lines[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("advice")
    tokenizer = byte_level()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=256)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(made / "model")
    tokenizer.save_pretrained(made / "model")
    (made / "text.txt").write_text("It is a truth universally acknowledged. " * 30, encoding="utf-8")
    return made


def invoke(folder, *arguments):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--sequences", 3, "--length", 160]
    return CliRunner().invoke(command, [str(part) for part in [*options, *arguments]])


def test_the_command_bisects_resumes_and_advises(folder, tmp_path, monkeypatch):
    measured = []
    measure = advise_run.measure

    def noted(model, grant, *rest):
        measured.append((grant.policy, grant.layer_slots[0]))
        return measure(model, grant, *rest)

    monkeypatch.setattr(advise_run, "measure", noted)
    out = tmp_path / "out.json"
    # An untrained model loses next to nothing, so every budget is within 50 %.
    result = invoke(folder, "--policy", "h2o", "--policy", "streaming", "--loss", 50, "--json", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["policy"] for row in rows} == {"h2o", "streaming"}
    assert measured[0] == ("full", 160)
    assert len(measured) == len(rows) + 1 <= 9
    for policy in ("h2o", "streaming"):
        smallest = min(row["budget"] for row in rows if row["policy"] == policy)
        assert f"{policy}: a budget of {smallest:.4g} changes perplexity by " in result.stdout
    assert "    scissorhands generate --policy " in result.stdout
    del measured[:]
    assert invoke(folder, "--policy", "h2o", "--loss", 50, "--json", out).exit_code == 0
    assert measured == []


def test_a_loss_that_no_budget_allows_and_sizes_that_no_budget_fits(folder, monkeypatch):
    # An untrained model may as well gain from a budget.
    monkeypatch.setattr(advise_run, "loss_percent", lambda row: 2.0)
    result = invoke(folder, "--policy", "h2o", "--budget", 0.5, "--budget", 0.6)
    assert result.exit_code == 0, result.output
    assert "h2o: no budget that was measured stays within 1 %; keep every token." in result.stdout
    assert "To use it" not in result.stdout
    result = invoke(folder, "--policy", "scissorhands:paper", "--budget", 0.01)
    assert result.exit_code == 2
    assert "--length: 160 tokens are too few for policy scissorhands:paper at any of the budgets" in result.stderr
