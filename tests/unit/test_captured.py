"""Steps of static shape, interpreted, against ordinary ones: the same tokens, the same evidence."""

from collections.abc import Iterator

import pytest
import torch
from support.tiny_models import random_tokens, tiny_model

from scissorhands import captured, kernels
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.captured import CapturedSteps
from scissorhands.errors import EngineError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.kernels import launch
from scissorhands.probe import model_shape, probe
from scissorhands.row import Row
from scissorhands.step import ModelStep

CPU = torch.device("cpu")
PROMPT = 14


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let steps be static on the processor, and note the sizes of those that are made."""
    sizes: list[int] = []

    class Noted(captured._StaticStep):
        def __init__(self, model, options, kind, pool):
            super().__init__(model, options, kind, pool)
            sizes.append(kind.size)

    monkeypatch.setattr(kernels, "capturable", lambda device: True)
    monkeypatch.setattr(kernels, "launch", launch, raising=False)
    monkeypatch.setattr(captured, "_StaticStep", Noted)
    return sizes


class Decoding:
    """Rows of a tiny model that decode the likeliest tokens.

    Args:
        name: The model.
    """

    def __init__(self, name: str = "llama_wide") -> None:
        self.model = tiny_model(name)
        probe(self.model)
        self.shape = model_shape(self.model)
        self.cache, self.step = ResidentCache(self.shape, torch.float32, CPU), ModelStep(self.model)
        self.texts: dict[str, list[int]] = {}

    def grant(self, policy: str = "scissorhands", preset: str = "counts", budget: int = 18, codec: str = "") -> Grant:
        request = BudgetRequest.tokens(budget)
        return grant(request, PolicyRequest(policy, preset), self.shape, 60, **({"codec": codec} if codec else {}))

    def join(self, name: str, granted: Grant) -> None:
        """Let a row read a prompt of its own."""
        row = self.cache.add_row(granted, name)
        prompt = random_tokens(PROMPT, seed=sum(name.encode())).tolist()
        while row.step < PROMPT:
            size = row.next_chunk(PROMPT - row.step)
            self.cache.prepare_prefill(row, size)
            logits = self.step([row], [prompt[row.step : row.step + size]])
        self.texts[name] = [int(logits[0].argmax())]

    def leave(self, name: str) -> None:
        self.cache.remove_row(next(row for row in self.rows if row.name == name))

    @property
    def rows(self) -> list[Row]:
        return self.cache.rows

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            for row in self.rows:
                self.cache.prepare_decode(row)
            logits = self.step(self.rows, [[self.texts[row.name][-1]] for row in self.rows])
            for row, own in zip(self.rows, logits, strict=True):
                self.texts[row.name].append(int(own.argmax()))

    def evidence(self) -> list[torch.Tensor]:
        return [
            tensor[row.index, :, :length].float()
            for row in self.rows
            for length, layer in zip(row.lengths, row.pool.layers, strict=True)
            for tensor in (layer.positions, *layer.states)
        ]


@torch.inference_mode()
def joined_and_left(codec: str, *, mixed: bool) -> Decoding:
    """Decode while rows join, leave, and evict; with budgets of two sizes if ``mixed``."""
    found = Decoding()
    found.join("one", found.grant(codec=codec))
    found.decode(2)
    found.join("two", found.grant(codec=codec, budget=24 if mixed else 18))
    found.join("three", found.grant(codec=codec))
    found.decode(3)
    found.leave("one")
    found.decode(2)
    assert all(row.epoch for row in found.rows if row.grant.layer_slots[0] == 18)
    return found


@pytest.mark.parametrize(("codec", "mixed"), [("", True), ("int4", False)])
def test_static_steps_say_and_hold_what_ordinary_ones_do(static, monkeypatch, codec, mixed):
    found = joined_and_left(codec, mixed=mixed)
    assert static == [1, 4, 2]
    monkeypatch.setattr(kernels, "capturable", lambda device: False)
    expected = joined_and_left(codec, mixed=mixed)
    assert len(static) == 3
    assert found.texts == expected.texts
    for own, other in zip(found.evidence(), expected.evidence(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_rows_come_and_go_without_a_new_step(static):
    """And a row says the same whatever is beside it, wherever its tensors are."""
    alone, among = Decoding(), Decoding()
    for found in (alone, among):
        found.join("one", found.grant("h2o", "default"))
    alone.decode(4)
    among.join("two", among.grant("h2o", "default"))
    among.decode(1)
    among.join("three", among.grant("h2o", "default"))
    among.decode(1)
    among.join("four", among.grant("h2o", "default", budget=30))
    among.decode(1)
    among.leave("two")
    among.leave("four")
    among.decode(1)
    assert among.texts["one"] == alone.texts["one"]
    assert static == [1, 2, 4]


@torch.inference_mode()
def test_steps_that_are_kept_are_bounded(static, monkeypatch):
    monkeypatch.setattr(captured, "_MOST_STEPS", 2)
    found = Decoding()
    for name in ("one", "two", "three"):
        found.join(name, found.grant("h2o", "default"))
        found.decode(1)
    for name in ("one", "two"):
        found.leave(name)
        found.decode(1)
    assert static == [1, 2, 4, 1]
    assert len(found.step._captured._steps) == 2


@torch.inference_mode()
def test_what_cannot_be_captured_is_stepped_without_a_graph(static):
    """Signals that no kernel keeps, rows that gather different evidence, and a pass that is repeated."""
    unfit = Decoding()
    unfit.join("one", unfit.grant("r-kv", "default"))
    unfit.join("two", unfit.grant("fastgen", "default"))
    unfit.decode(1)
    various = Decoding()
    various.join("one", various.grant("h2o", "default"))
    various.join("two", various.grant("tova", "default"))
    various.decode(1)
    repeated = Decoding()
    repeated.join("one", repeated.grant("h2o", "default"))
    repeated.rows[0].observed_layers = 1
    repeated.decode(1)
    assert static == []


@torch.inference_mode()
def test_a_model_that_asks_for_lengths_is_stepped_without_a_graph(static, caplog):
    """A graph would keep them. The attempt touches no row."""

    def asking(module, positional, named):
        named["cache"].get_seq_length()

    found, expected = Decoding(), Decoding()
    found.model.register_forward_pre_hook(asking, with_kwargs=True)
    expected.step._captured = lambda rows, tokens: None
    for decoding in (found, expected):
        decoding.join("one", decoding.grant("h2o", "default"))
        decoding.decode(3)
    assert caplog.text.count("cannot be captured") == 1
    assert static == []
    assert found.texts == expected.texts
    for own, other in zip(found.evidence(), expected.evidence(), strict=True):
        assert torch.equal(own, other)


@torch.inference_mode()
def test_a_full_row_is_refused(static):
    found = Decoding()
    found.join("one", found.grant("h2o", "default"))
    row = found.rows[0]
    found.decode(row.slack)
    held = found.evidence()
    with pytest.raises(EngineError, match="no room"):
        CapturedSteps(found.model, {})([row], [[5]])
    assert all(torch.equal(own, other) for own, other in zip(found.evidence(), held, strict=True))
