"""Recall: summaries, what is chosen by them, and the swap that brings evicted slots back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import random_tokens, tiny_model

from scissorhands.archive import decode_section
from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.centroids import centroids_of
from scissorhands.codec import get_codec
from scissorhands.errors import CorruptSegmentError
from scissorhands.evaluation.recalling import ARCHIVE_CODEC, Recall, Recaller
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape, probe
from scissorhands.recall import CANDIDATES, HeadSketch, allowance, choose, estimate
from scissorhands.segment import check_segment
from scissorhands.slots import LooseSlots
from scissorhands.step import ModelStep
from scissorhands.summary import BLOCK_SLOTS, SectionSummary, pack_summary, read_summary, summary_bytes
from scissorhands.swap import sketch_of, swap

CPU = torch.device("cpu")
HEAD_DIM = 8
PROMPT, BUDGET = 150, 60
# One for each kind of evidence.
POLICIES = (
    "scissorhands",
    "scissorhands:counts",
    "scissorhands:paper",
    "tova",
    "snapkv",
    "r-kv",
    "expected-attention",
    "merged:h2o",
    "fastgen",
)


def keys_of(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, HEAD_DIM, generator=generator) for size in sizes]


def summaries(keys, positions):
    centroids, counts = centroids_of(keys)
    data = pack_summary(positions, centroids.numpy(), counts.numpy())
    sizes = [len(own) for own in keys]
    assert len(data) == summary_bytes(sizes, HEAD_DIM)
    return read_summary(data, sizes, HEAD_DIM)


def test_a_summary_is_read_as_it_was_written():
    keys = keys_of(40, 0, 16, 1)
    positions = [np.arange(start, start + len(own)) * 3 for start, own in enumerate(keys)]
    centroids, counts = centroids_of(keys)
    read = summaries(keys, positions)
    assert [len(section.counts) for section in read] == [3, 0, 1, 1]
    for section, own in zip(read, positions, strict=True):
        np.testing.assert_array_equal(section.positions, own)
    np.testing.assert_array_equal(np.concatenate([section.counts for section in read]), counts.numpy())
    # Four bits: half a step of a seventh of the largest element.
    found = np.concatenate([section.centroids for section in read])
    assert np.all(np.abs(found - centroids.numpy()) <= np.abs(centroids.numpy()).max(axis=2, keepdims=True) / 13.9)
    for size, section in zip((40, 0, 16, 1), read, strict=True):
        assert section.counts.sum() == size


def test_a_summary_of_another_size_is_refused():
    keys = keys_of(5)
    centroids, counts = centroids_of(keys)
    data = pack_summary([np.arange(5)], centroids.numpy(), counts.numpy())
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(CorruptSegmentError, match="summary is"):
            read_summary(wrong, [5], HEAD_DIM)
    with pytest.raises(ValueError, match="blocks"):
        pack_summary([np.arange(17)], centroids.numpy(), counts.numpy())


def test_few_kinds_of_keys_are_their_own_centroids():
    kinds = torch.tensor([[7.0] * 8, [-7.0] * 8, [7.0, -7.0] * 4, [-7.0, 7.0] * 4])
    order = [0] * 5 + [1] * 3 + [2] * 6 + [3] * 2
    (section,) = summaries([kinds[order]], [np.arange(BLOCK_SLOTS)])
    assert sorted(section.counts[0].tolist()) == [2, 3, 5, 6]
    queries = keys_of(6, seed=1)[0].numpy()
    exact = np.logaddexp.reduce(queries @ kinds[order].numpy().T, axis=1)
    np.testing.assert_allclose(estimate(queries, section.centroids, section.counts)[:, 0], exact, rtol=1e-3)


def test_an_estimate_is_near_what_the_keys_themselves_give():
    # As in a text: neighbors are alike.
    topics, noise = keys_of(4 * 40, 16 * 40)
    keys = [2 * topics.repeat_interleave(4, dim=0) + 0.5 * noise]
    (section,) = summaries(keys, [np.arange(len(keys[0]))])
    queries = keys_of(30, seed=2)[0].numpy()
    exact = np.logaddexp.reduce((queries @ keys[0].numpy().T).reshape(30, 40, 16), axis=2)
    found = estimate(queries, section.centroids, section.counts)
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.9


def section_of(direction, positions, size=4.0):
    """A section all of whose keys look in one direction."""
    keys = torch.zeros(len(positions), HEAD_DIM)
    keys[:, direction] = size
    return summaries([keys], [np.asarray(positions)])[0]


def asked(direction, resident=(), allowed=8):
    query = np.zeros((1, HEAD_DIM), np.float16)
    query[0, direction] = 3
    return HeadSketch(query, np.asarray(resident, dtype=np.int32), allowed)


def test_what_is_asked_for_is_chosen():
    archive = {
        2: [section_of(0, range(16)), section_of(1, range(16))],
        5: [section_of(1, range(16, 32)), section_of(0, range(16, 32))],
    }
    found = choose([asked(1, allowed=4), asked(1, allowed=2)], archive)
    assert [(part.epoch, part.head, part.slots.tolist()) for part in found] == [
        (2, 1, list(range(8, 16))),
        (5, 0, list(range(16))),
    ]


def test_no_token_twice_and_none_that_is_there():
    # The token at 20 was evicted, recalled, and evicted again.
    archive = {1: [section_of(0, [3, 7, 20])], 4: [section_of(0, [20, 30])]}
    found = choose([asked(0, resident=[0, 7])], archive)
    chosen = [(part.epoch, slot) for part in found for slot in part.slots.tolist()]
    positions = [int(archive[epoch][0].positions[slot]) for epoch, slot in chosen]
    assert sorted(positions) == [3, 20, 30]


def test_the_allowance_is_kept_and_nothing_is_asked_of_an_empty_archive():
    archive = {0: [section_of(0, range(100))]}
    for allowed in (0, 1, 5):
        found = choose([asked(0, allowed=allowed)], archive)
        assert sum(len(part.slots) for part in found) == allowed * CANDIDATES
    assert choose([asked(0)], {}) == []
    nothing = SectionSummary(np.zeros(0, np.uint32), np.zeros((0, 4, HEAD_DIM), np.float32), np.zeros((0, 4), np.uint8))
    assert choose([asked(0)], {0: [nothing]}) == []
    assert (allowance(0.25, 100, 100, 80), allowance(0.25, 100, 50, 30), allowance(0.25, 100, 20, 30)) == (20, 20, 0)


def test_numbers_that_are_not_finite_do_no_harm():
    archive = {0: [section_of(0, range(32))]}
    query = np.full((1, HEAD_DIM), np.nan, np.float16)
    found = choose([HeadSketch(query, np.zeros(0, np.int32), 2)], archive)
    assert sum(len(part.slots) for part in found) == 2 * CANDIDATES


class Reading:
    """A row of a tiny model that has read most of a prompt, and archived what it evicted."""

    def __init__(self, policy="scissorhands", by_head=False, codec="none", recall=0.5) -> None:
        self.model = tiny_model("llama_grouped")
        probe(self.model)
        shape = model_shape(self.model)
        granted = grant(BudgetRequest.tokens(BUDGET), PolicyRequest(*policy.split(":", 1)), shape, PROMPT, codec=codec)
        if by_head:
            slots = [n + extra for n in granted.layer_slots for extra in (0, 12)]
            codecs = tuple(own for own in granted.codecs for _ in range(shape.kv_heads))
            granted = replace(granted, layer_slots=tuple(slots), by_head=True, codecs=codecs)
        self.cache = ResidentCache(shape, torch.float32, CPU)
        self.row = self.cache.add_row(granted, limit=2 * PROMPT)
        self.step = ModelStep(self.model)
        self.recaller = Recaller(self.step, self.cache, self.row, Recall(recall))
        self.tokens = random_tokens(PROMPT, 0).tolist()
        self.read(PROMPT - 10)

    @torch.inference_mode()
    def read(self, end: int) -> torch.Tensor:
        logits = torch.empty(0)
        while self.row.step < end:
            size = self.row.next_chunk(end - self.row.step)
            self.recaller.keep(self.cache.prepare_prefill(self.row, size))
            logits = self.step([self.row], [self.tokens[self.row.step : self.row.step + size]])
        return logits

    def held(self):
        """Return copies of all heads' slots in use: positions, keys, values and states, by pool layer."""
        return [
            [tensor[self.row.index, :, :length].clone() for tensor in pool.tensors()]
            for pool, length in zip(self.row.pool.layers, self.row.lengths, strict=True)
        ]


@torch.inference_mode()
def test_a_peek_leaves_no_trace():
    peeked, plain = Reading(), Reading()
    room = peeked.cache.prepare_prefill(peeked.row, 10), plain.cache.prepare_prefill(plain.row, 10)
    assert room[0].epoch == room[1].epoch
    queries = peeked.step.peek(peeked.row, peeked.tokens[-10:])
    assert [query.shape for query in queries] == [(4, 10, 8)] * 2
    for found, expected in zip(peeked.held(), plain.held(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert peeked.row.step == plain.row.step == PROMPT - 10
    assert torch.equal(peeked.read(PROMPT), plain.read(PROMPT))
    for found, expected in zip(peeked.held(), plain.held(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def positions_of(reading):
    return [
        pool.positions[reading.row.index, head, :length].tolist()
        for pool, length in zip(reading.row.pool.layers, reading.row.lengths, strict=True)
        for head in range(pool.positions.shape[1])
    ]


@pytest.mark.parametrize("codec", ["none", "int4-hadamard"])
@pytest.mark.parametrize("by_head", [False, True])
@torch.inference_mode()
def test_a_swap_keeps_the_budget_and_loses_nothing(by_head, codec):
    reading = Reading(by_head=by_head, codec=codec)
    row, recaller = reading.row, reading.recaller
    recaller.keep(reading.cache.prepare_prefill(row, 10))
    lengths, size, epoch = list(row.lengths), reading.cache.allocated_bytes(), row.epoch
    before = positions_of(reading)
    recaller.recall(reading.tokens[-10:])
    after = positions_of(reading)
    assert (row.lengths, reading.cache.allocated_bytes(), row.epoch, row.pending) == (lengths, size, epoch + 1, None)
    assert recaller.recalled > 0
    header, data = recaller._segments[epoch]
    assert check_segment(data) == header
    swapped = 0
    for head, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new == sorted(new)
        assert len(new) == len(set(new)) == len(old)
        gone, come = set(old) - set(new), set(new) - set(old)
        swapped += len(come)
        section = header.sections[head]
        positions = np.frombuffer(data, "<u4", section.slots, section.offset)
        assert positions.tolist() == sorted(gone)
        layer = head if by_head else head // 2
        parameters = row.grant.parameters.within(row.grant.layer_slots[layer])
        assert set(old[: parameters.sinks]) <= set(new)
        assert set(old[-parameters.recent :]) <= set(new)
        assert len(come) <= row.grant.layer_slots[layer] * 0.5
    assert swapped == recaller.recalled
    reading.read(PROMPT)


@torch.inference_mode()
def test_nothing_goes_out_for_what_is_wanted_less():
    reading = Reading()
    row = reading.row
    reading.recaller.keep(reading.cache.prepare_prefill(row, 10))
    queries = [torch.ones(4, 3, HEAD_DIM)] * 2
    sketch = sketch_of(row, queries, 0.5)
    before = positions_of(reading)
    candidates = {}
    for place, held in enumerate(before):
        absent = sorted(set(range(row.step)) - set(held))[: sketch[place].allowance]
        keys = torch.full((len(absent), HEAD_DIM), -5.0)
        keys[1::2] = 5.0
        candidates[place] = LooseSlots(torch.tensor(absent, dtype=torch.int32), keys, torch.zeros_like(keys))
    swapped = swap(reading.cache, row, sketch, candidates)
    for old, new, own in zip(before, positions_of(reading), candidates.values(), strict=True):
        assert set(new) - set(old) == set(own.positions[1::2].tolist())
    assert swapped.slots == sum(len(own.positions) // 2 for own in candidates.values()) > 0


@pytest.mark.parametrize("by_head", [False, True])
@torch.inference_mode()
def test_recalled_slots_are_what_decoding_their_section_gives(by_head):
    reading = Reading(by_head=by_head)
    row, recaller = reading.row, reading.recaller
    recaller.keep(reading.cache.prepare_prefill(row, 10))
    stored = {}
    for header, data in recaller._segments.values():
        for head, section in enumerate(header.sections):
            own = data[section.offset : section.offset + section.size]
            codec = get_codec(ARCHIVE_CODEC, header.head_dim)
            parts = decode_section(own, section.slots, codec, header.head_dim, torch.float32)
            for position, key, value in zip(*parts, strict=True):
                stored.setdefault((head, int(position)), (key, value))
    before = positions_of(reading)
    recaller.recall(reading.tokens[-10:])
    checked = 0
    for head, (old, new) in enumerate(zip(before, positions_of(reading), strict=True)):
        layer, own = (head, 0) if by_head else divmod(head, 2)
        pool = row.pool.layers[layer]
        for slot, position in enumerate(new):
            if position not in old:
                key, value = stored[head, position]
                assert torch.equal(pool.keys[row.index, own, slot], key)
                assert torch.equal(pool.values[row.index, own, slot], value)
                checked += 1
    assert checked == recaller.recalled > 0


@pytest.mark.parametrize("policy", POLICIES)
@torch.inference_mode()
def test_recalled_slots_outlive_the_next_eviction(policy):
    reading = Reading(policy)
    recaller = reading.recaller
    recaller.keep(reading.cache.prepare_prefill(reading.row, 10))
    before = positions_of(reading)
    recaller.recall(reading.tokens[-10:])
    come = [set(new) - set(old) for old, new in zip(before, positions_of(reading), strict=True)]
    for state in reading.held():
        assert all(torch.isfinite(tensor.float()).all() for tensor in state)
    reading.read(PROMPT)
    reading.cache.prepare_prefill(reading.row, 1)
    while reading.row.slack < 1:
        reading.cache.prepare_decode(reading.row)
    left = sum(len(own & set(new)) for own, new in zip(come, positions_of(reading), strict=True))
    assert left > 0


@torch.inference_mode()
def test_equal_recalls_give_equal_rows():
    answers = []
    for _ in range(2):
        reading = Reading()
        reading.recaller.keep(reading.cache.prepare_prefill(reading.row, 10))
        reading.recaller.recall(reading.tokens[-10:])
        answers.append((positions_of(reading), reading.read(PROMPT)))
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])
