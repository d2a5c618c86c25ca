"""Kernels, interpreted, against torch: the same slots, the same evidence, the same answers."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.codec_data import HEADS, codec_of
from support.tiny_models import random_tokens, tiny_model

from scissorhands import attention, kernels
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.kernels import launch, table
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.probe import model_shape, probe
from scissorhands.row import Row
from scissorhands.signals import LastAttention, LowCount, Mass, Signal, Weight, WindowMass
from scissorhands.signals.low_count_ring import LowCountRing
from scissorhands.span import Span
from scissorhands.step import ModelStep

CPU = torch.device("cpu")
SLOTS = 600
# Tokens that rows read before they decode: so many that evictions come soon.
PROMPT = 14
EVIDENCE = (Mass(), LowCount(6), WindowMass(6), LastAttention(), Weight())
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Layer:
    """One of two equal layers with random slots, which attend by different means.

    Args:
        lengths: Slots in use of each row.
        codec: Name of the format.
        dtype: Number type of the model.
        head_dim: Elements of a key.
        signals: The evidence.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        codec: str = "none",
        dtype: torch.dtype = torch.float32,
        head_dim: int = 64,
        signals: tuple[Signal, ...] = EVIDENCE,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        packed = (
            None
            if codec == "none"
            else LayerCodec(*(getattr(codec_of(codec, head_dim), s) for s in ("keys", "values")))
        )
        self.lengths, self.dtype, self.head_dim = lengths, dtype, head_dim
        self.pool = LayerPool(len(lengths), HEADS, SLOTS, head_dim, signals, dtype, CPU, packed)
        for row, length in enumerate(lengths):
            keys, values = torch.randn(2, 1, HEADS, length, head_dim, generator=generator).to(dtype)
            span = Span(slice(row, row + 1), (0,), (0,), length, CPU)
            self.pool.append(span, keys, values)
            for signal, state in zip(signals, self.pool.states, strict=True):
                used = state[row, :, :length]
                made = torch.randint(0, 3, used.shape, generator=generator)
                used.copy_(made * (0.3 if isinstance(signal, Weight) else 1))

    def new(self, group: int, seed: int) -> NewTokens:
        generator = torch.Generator().manual_seed(seed)
        rows = len(self.lengths)
        query = torch.randn(rows, HEADS * group, 1, self.head_dim, generator=generator).to(self.dtype)
        keys, values = torch.randn(2, rows, HEADS, 1, self.head_dim, generator=generator).to(self.dtype)
        return NewTokens(query, keys, values, scaling=2.0 * self.head_dim**-0.5)

    def span(self, after: int = 0) -> Span:
        lengths = tuple(length + after for length in self.lengths)
        steps = tuple(3 * row + length for row, length in enumerate(lengths))
        return Span(slice(0, len(lengths)), lengths, steps, 1, CPU)


def assert_equal(found: Layer, expected: Layer, tolerance: float) -> None:
    """Assert that two layers hold the same."""
    for own, other in zip(found.pool.tensors(), expected.pool.tensors(), strict=True):
        if own.dtype == torch.float32 and own.dim() <= 4 and own is not found.pool.keys:
            torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("lengths", "group", "head_dim", "codec", "dtype"),
    [
        ((5,), 1, 64, "none", torch.float32),
        ((0, 255, 256, 599), 2, 64, "none", torch.float32),
        ((300, 300), 3, 32, "none", torch.float32),
        ((130, 7), 4, 128, "none", torch.float16),
        ((130, 7), 4, 128, "none", torch.bfloat16),
        ((40, 90), 20, 16, "none", torch.float32),
        ((270, 3, 64), 3, 64, "int8", torch.float32),
        ((270, 3), 4, 128, "int4", torch.float32),
        ((70, 3), 2, 256, "int4", torch.float32),
        ((70, 3), 2, 32, "int4", torch.float32),
        ((270, 3, 64), 3, 64, "int4-hadamard", torch.float32),
        ((270, 3), 4, 128, "int4-hadamard", torch.bfloat16),
        ((90,), 1, 64, "turboquant:k4v2", torch.float32),
    ],
)
def test_kernels_do_what_torch_does(lengths, group, head_dim, codec, dtype):
    mine, theirs = (Layer(lengths, codec, dtype, head_dim) for _ in range(2))
    assert launch.fits(mine.pool, group)
    tolerance = TOLERANCES[dtype]
    for after in range(min(4, SLOTS - max(lengths))):
        new, span = mine.new(group, after), mine.span(after)
        found = launch.attend(mine.pool, span, new, observe=True)
        expected = attention.attend(theirs.pool, span, new, observe=True)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        if dtype == torch.float32:
            assert_equal(mine, theirs, 1e-5)
        else:
            masses = (layer.pool.states[0] for layer in (mine, theirs))
            torch.testing.assert_close(*masses, rtol=tolerance, atol=tolerance)
    assert bool(mine.pool.states[1].any())


def test_a_repeated_query_is_not_counted_again():
    mine, theirs = Layer((50, 9)), Layer((50, 9))
    new, span = mine.new(2, 0), mine.span()
    first = launch.attend(mine.pool, span, new, observe=True)
    again = launch.attend(mine.pool, span, new, observe=False)
    attention.attend(theirs.pool, span, new, observe=True)
    assert torch.equal(first, again)
    assert_equal(mine, theirs, 1e-5)


@pytest.mark.parametrize("codec", ["none", "int4-hadamard"])
def test_the_rest_of_a_batch_changes_no_bit(codec):
    """Alone, among others, and with places that have no row."""
    batch, again = (Layer((300, 20, 599), codec) for _ in range(2))
    new, span = batch.new(3, 0), batch.span()
    together = launch.attend(batch.pool, span, new, observe=True)
    order = [1, -1, 0]
    entries = [table.entry(again.pool, max(row, 0)) for row in order]
    places = launch.Places(
        torch.tensor(entries).T.contiguous(),
        torch.tensor([again.lengths[row] if row >= 0 else -1 for row in order]),
        torch.tensor([span.steps[row] for row in order]),
        5000,
    )
    chosen = NewTokens(*(states[order] for states in new[:3]), new.scaling)
    apart = launch.attend_at(again.pool, places, chosen, observe=True)
    assert torch.equal(apart[0], together[1])
    assert torch.equal(apart[2], together[0])
    assert not bool(apart[1].any())
    for own, other in zip(again.pool.tensors(), batch.pool.tensors(), strict=True):
        assert torch.equal(own[:2], other[:2])


def test_rows_are_cut_by_their_capacity_alone():
    pieces = [(capacity, table.piece_of(capacity)) for capacity in (1, 256, 257, 16384, 16385, 65536, 10**6)]
    assert pieces[:3] == [(1, 256), (256, 256), (257, 256)]
    assert all(capacity <= piece * table.most_pieces(capacity) for capacity, piece in pieces)
    assert all(table.most_pieces(first) <= table.most_pieces(second) for (first, _), (second, _) in pairwise(pieces))


@pytest.mark.parametrize(
    ("fits", "options"),
    [
        (True, {}),
        (True, {"codec": "int4"}),
        (False, {"codec": "turboquant:k4v3"}),
        (False, {"codec": "klt:k4v4"}),
        (False, {"head_dim": 48}),
        (False, {"signals": (Mass(), LowCountRing(4))}),
    ],
    ids=["exact", "packed", "three_bits", "by_head", "odd_size", "ring"],
)
def test_what_kernels_cannot_do_is_known_before(fits, options):
    pool = Layer((1,), **options).pool
    assert launch.fits(pool, 2) is fits
    assert not launch.fits(pool, 65)


def test_a_model_says_the_same(monkeypatch):
    """Through evictions, with rows of different lengths, at the seam that chooses kernels on a GPU."""
    without = decoded()
    monkeypatch.setattr(kernels, "fits", lambda pool, new: new.query.shape[2] == 1 and launch.fits(pool, 2))
    launches = []
    monkeypatch.setattr(kernels, "attend", lambda *a, **k: launches.append(1) or launch.attend(*a, **k))
    torch.testing.assert_close(decoded(), without, rtol=1e-3, atol=1e-3)
    assert launches


@torch.inference_mode()
def decoded() -> torch.Tensor:
    """Return the logits of a row, and of another that begins later, step by step behind a prompt each."""
    model = tiny_model("llama_wide")
    probe(model)
    shape = model_shape(model)
    own = grant(BudgetRequest.tokens(18), PolicyRequest("scissorhands", "counts"), shape, 60, codec="int4")
    cache, step = ResidentCache(shape, torch.float32, CPU), ModelStep(model)
    rows: list[Row] = []
    logits = []
    tokens = random_tokens(PROMPT + 9, seed=1).tolist()
    for place, token in enumerate(tokens[PROMPT:]):
        if place in {0, 3}:
            rows.append(cache.add_row(own))
            read(cache, step, rows[-1], tokens[:PROMPT])
        for row in rows:
            cache.prepare_decode(row)
        logits.append(step(rows, [[token]] * len(rows))[-1])
    assert all(row.epoch for row in rows)
    return torch.stack(logits)


def read(cache: ResidentCache, step: ModelStep, row: Row, prompt: list[int]) -> None:
    """Let a row read a prompt, chunk by chunk; no kernel does that."""
    while row.step < len(prompt):
        tokens = row.next_chunk(len(prompt) - row.step)
        cache.prepare_prefill(row, tokens)
        step([row], [prompt[row.step : row.step + tokens]])
    assert row.epoch == 0


def test_kernels_compile_for_a_gpu(tmp_path):
    """For sm_90, to machine code; no GPU is needed."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "support.compile_kernels"]
    tests = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = done.stdout.splitlines()
    assert len(compiled) == len(set(compiled)) >= 12
