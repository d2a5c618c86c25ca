"""Facts hidden in text: prompts, what counts as found, and the commands."""

import json

import pytest
import torch
from click.testing import CliRunner
from support.tiny_folder import make_folder
from support.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from transformers import AutoModelForCausalLM, AutoTokenizer

from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation import retrieval_run
from scissorhands.evaluation.commands import evaluate
from scissorhands.evaluation.retrieval import KINDS, fact_of, hide

TEXT = "One sentence. Another one! Is this the third? " * 20
MOST = 400


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0.0, 0.3, 0.5, 1.0])
def test_where_a_fact_is_hidden(template, kind, position):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    fact = fact_of(KINDS[kind], 0, 0)
    filler = tokenizer(TEXT)["input_ids"]
    ids = hide(fact, tokenizer, filler, position, MOST)
    assert MOST - 4 <= len(ids) <= MOST
    prompt = tokenizer.decode(ids)
    begin, end = ("[user]", "[assistant]") if template else ("", "\nAnswer:")
    assert prompt.startswith(begin + fact.before + "\n")
    assert prompt.endswith(fact.question + end)
    before, _, after = prompt.partition(fact.hidden)
    before, after = before.removeprefix(begin + fact.before).strip(), after.removesuffix(fact.question + end).strip()
    assert f"{before} {after}".strip() in TEXT
    assert not before or position == 1 or before[-1] in ".!?"
    # A sentence has up to 19 characters.
    share = len(before) / len(before + after)
    assert position - 20 / len(before + after) <= share <= position + 0.01


def test_facts_follow_from_seed_and_trial():
    for kind in KINDS.values():
        assert fact_of(kind, 1, 2) == fact_of(kind, 1, 2)
        facts = {fact_of(kind, seed, trial) for seed in range(2) for trial in range(6)}
        assert len(facts) >= 8
        assert all(fact.expected in fact.hidden and fact.expected not in fact.question for fact in facts)


@pytest.mark.parametrize(
    ("kind", "answer", "expected", "right"),
    [
        ("passkey", "The pass key is 12345.", "12345", True),
        ("passkey", "12345", "12345", True),
        ("passkey", "123456", "12345", False),
        ("passkey", "54321, no, 12345", "12345", False),
        ("passkey", "I do not know", "12345", False),
        ("needle", "Rice, of course.", "rice", True),
        ("needle", "The cook", "rice", False),
    ],
)
def test_what_counts_as_found(kind, answer, expected, right):
    assert KINDS[kind].found(answer, expected) is right


def test_a_length_without_room_for_the_question(tokenizer):
    with pytest.raises(InvalidRequestError, match=r"length: too short: the question alone takes \d+ tokens of 50"):
        hide(fact_of(KINDS["passkey"], 0, 0), tokenizer, [5] * 100, 0.5, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("retrieval"), positions=512, chat_template=CHAT_TEMPLATE)


def invoke(folder, kind, *more):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--sequences", 2]
    asked = [kind, *options, "--length", 260, "--length", 300, "--position", 0.5, "--budget", 0.4, *more]
    return CliRunner().invoke(evaluate, [str(part) for part in asked])


def test_the_command_and_its_resuming(folder, tmp_path, monkeypatch):
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    measured = []
    measure = retrieval_run._Trials.measure
    monkeypatch.setattr(retrieval_run._Trials, "measure", lambda *given: measured.append(given[1:3]) or measure(*given))
    files = ("--json", out, "--plot", plot, "--markdown", tmp_path / "table.md")
    result = invoke(folder, "passkey", "--policy", "h2o", *files)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    cells = [(row["policy"], row["length"], row["slots"]) for row in rows]
    assert cells == [("full", 260, 260), ("h2o", 260, 104), ("full", 300, 300), ("h2o", 300, 120)]
    for row in rows:
        judged = [KINDS["passkey"].found(*pair) for pair in zip(row["answers"], row["expected"], strict=True)]
        assert (row["found"], row["trials"], row["success"]) == (sum(judged), 2, sum(judged) / 2)
        assert all(row["length"] - 20 <= tokens <= row["length"] - 16 for tokens in row["prompt_tokens"])
        assert row["expected"] == rows[0]["expected"]
    assert rows[1]["full_success"] == rows[0]["success"]
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "table.md").read_text().count("\n| h2o |") == 2
    del measured[:]
    assert invoke(folder, "passkey", "--policy", "streaming", *files).exit_code == 0
    assert [(choice.policy, length) for choice, length in measured] == [("streaming", 260), ("streaming", 300)]
    assert json.loads(out.read_text())["rows"][:4] == rows
    assert (tmp_path / "table.md").read_text().count("\n| h2o |") == 0


def test_the_full_cache_answers_as_transformers_does(folder, tmp_path):
    out = tmp_path / "out.json"
    result = CliRunner().invoke(
        evaluate,
        [
            *("needle", "--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--sequences", "2"),
            *("--length", "300", "--position", "0.5", "--budget", "0.4", "--json", str(out)),
        ],
    )
    assert result.exit_code == 0, result.output
    row = json.loads(out.read_text())["rows"][0]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    kind = KINDS["needle"]
    ids = tokenizer((folder / "text.txt").read_text())["input_ids"]
    for trial, answer in enumerate(row["answers"]):
        start = trial * len(ids) // 2
        prompt = hide(fact_of(kind, 0, trial), tokenizer, ids[start : start + 300], 0.5, 300 - kind.new_tokens)
        tokens = torch.tensor([prompt])
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=32)
        expected = tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True).strip()
        assert answer == expected


def test_recall_is_measured_beside_each_budget(folder, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    asked = ("--policy", "h2o", "--recall", 0.5, "--recall-every", 3, "--json", out, "--plot", plot)
    result = invoke(folder, "passkey", *asked)
    assert result.exit_code == 0, result.output
    assert "0.5, every 3 tokens" in result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["recall"] and row["recall"]["share"] for row in rows] == [None, None, 0.5] * 2
    full, without, recalling = rows[:3]
    assert full["slots"] > without["slots"] == recalling["slots"]
    assert without["bytes_per_sequence"] == recalling["bytes_per_sequence"]
    assert without["recalled_slots"] == []
    assert all(recalled > 0 for recalled in recalling["recalled_slots"])
    assert all(
        0 < summary < archived
        for summary, archived in zip(recalling["summary_bytes"], recalling["archive_bytes"], strict=True)
    )
    assert plot.read_bytes()[:4] == b"\x89PNG"
