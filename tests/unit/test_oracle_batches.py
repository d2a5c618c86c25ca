"""Batches against the reference: every row is as if it were alone."""

import random
from dataclasses import replace

import pytest
import torch
from support.dense_reference import DenseSequence, Rules
from support.engine_path import EnginePath, policy_of
from support.oracle import RULES, assert_close, assert_kept
from support.tiny_models import TINY_MODELS, random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.row import Row

LENGTHS = (45, 31, 8)
DECODED = 80
CASES = [*((name, "default") for name in TINY_MODELS), *(("llama_grouped", policy) for policy in RULES)]


@pytest.mark.parametrize(("name", "policy"), dict.fromkeys(CASES))
def test_rows_of_a_left_padded_batch_equal_their_solo_references(name, policy):
    model, rules = tiny_model(name), RULES[policy]
    batch = PaddedBatch(model, rules)
    for row, logits in zip(batch.rows, batch.feed(batch.width), strict=True):
        assert_close(logits[-row.length :], row.reference.read(row.tokens[: row.length]))
    for step in range(DECODED):
        for row, logits in zip(batch.rows, batch.feed(1), strict=True):
            assert_close(logits[0], row.reference.decode(row.tokens[row.length + step]))
            assert_kept(batch.cache.rows[row.index], row.reference)
    assert min(row.reference.evictions for row in batch.rows) >= 2


def test_a_padded_batch_may_be_fed_column_by_column():
    # While a shorter row still waits for its first token, the longer ones decode as they would alone.
    batch = PaddedBatch(tiny_model("llama_grouped"), RULES["default"])
    for column in range(batch.width + 40):
        for row, logits in zip(batch.rows, batch.feed(1), strict=True):
            token = column - (batch.width - row.length)
            if token >= 0:
                assert_close(logits[0], row.reference.decode(row.tokens[token]))
                assert_kept(batch.cache.rows[row.index], row.reference)
    assert [row.step for row in batch.cache.rows] == [length + 40 for length in LENGTHS]


def test_rows_of_different_policies_and_budgets_step_together():
    model = tiny_model("llama_grouped")
    engine = EnginePath(model)
    rules = [
        RULES["default"],
        RULES["paper"],
        RULES["default"],
        RULES["h2o"],
        replace(RULES["default"], B=52),
        RULES["tova"],
        RULES["snapkv"],
        RULES["r-kv"],
        RULES["fastgen"],
        RULES["expected-attention"],
        RULES["protected"],
        RULES["streaming"],
        # The same pool as the first rows, other numbers.
        replace(RULES["default"], r=8, m=9, c=7),
    ]
    order = random.Random(5)
    running: list[Running] = []
    for step in range(150):
        if step % 6 == 0 and rules:  # Arrive one by one, while others decode.
            running.append(Running(engine, rules.pop(0), seed=step, prompt=20 + 5 * step // 6))
        if step in (70, 90):
            gone = running.pop(0 if step == 70 else 1)
            engine.cache.remove_row(gone.row)
        # Any order of the rows will do.
        order.shuffle(running)
        tokens = torch.stack([sequence.next_token() for sequence in running])
        logits = engine.decode([sequence.row for sequence in running], tokens)
        for sequence, token, actual in zip(running, tokens, logits, strict=True):
            assert_close(actual, sequence.reference.decode(token))
            assert_kept(sequence.row, sequence.reference)
        assert engine.cache.allocated_bytes() == sum(sequence.row.grant.bytes for sequence in running)
    assert min(sequence.reference.evictions for sequence in running) >= 4


class Running:
    """A row of the engine, its reference, and the tokens that both are fed."""

    def __init__(self, engine: EnginePath, rules: Rules, seed: int, prompt: int) -> None:
        tokens = random_tokens(400, seed)
        self.row: Row = engine.add(rules)
        self.reference = DenseSequence(engine.model, rules, 400)
        assert_close(engine.read(self.row, tokens[:prompt]), self.reference.read(tokens[:prompt]))
        self._tokens = iter(tokens[prompt:])

    def next_token(self) -> torch.Tensor:
        return next(self._tokens)


class PaddedRow:
    """One row of a batch: its tokens, how many of them are the prompt, and its reference."""

    def __init__(self, model, rules: Rules, index: int) -> None:
        self.index = index
        self.length = LENGTHS[index]
        self.tokens = random_tokens(self.length + DECODED, seed=index)
        self.reference = DenseSequence(model, rules, len(self.tokens))


class PaddedBatch:
    """A left-padded batch that is fed by columns, with the positions that ``generate`` would give."""

    def __init__(self, model, rules: Rules) -> None:
        self.rows = [PaddedRow(model, rules, index) for index in range(len(LENGTHS))]
        self.width = max(LENGTHS)
        self.cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))
        self._model = model
        self._fed = 0
        padding = [self.width - length for length in LENGTHS]
        self._ids = torch.stack(
            [torch.cat([torch.zeros(self.width - row.length, dtype=torch.long), row.tokens]) for row in self.rows]
        )
        self._mask = torch.stack([(torch.arange(self.width + DECODED) >= pad).long() for pad in padding])

    @torch.inference_mode()
    def feed(self, columns: int) -> torch.Tensor:
        new = slice(self._fed, self._fed + columns)
        mask = self._mask[:, : new.stop]
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, new]
        self._fed = new.stop
        return self._model(
            input_ids=self._ids[:, new], attention_mask=mask, position_ids=positions, cache=self.cache, use_cache=True
        ).logits
