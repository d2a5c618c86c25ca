"""Signals against counts made one query at a time from the whole attention matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.errors import InvalidRequestError
from scissorhands.grant import COMMON_EVIDENCE_BYTES, PolicyRequest, grant
from scissorhands.policies import get_policy
from scissorhands.signals import signals_for
from scissorhands.signals.base import Observation, Resident, Signal
from scissorhands.signals.expected_attention import ExpectedAttention
from scissorhands.signals.last_attention import LastAttention
from scissorhands.signals.low_count import LowCount
from scissorhands.signals.low_count_ring import LowCountRing
from scissorhands.signals.mass import Mass
from scissorhands.signals.redundancy import Redundancy
from scissorhands.signals.token_kind import TokenKinds
from scissorhands.signals.window_mass import WindowMass
from scissorhands.span import Span

HEADS, GROUP, SLOTS = 2, 3, 40
SIGNALS = [Mass(), LowCount(6), LowCountRing(6), LastAttention(), WindowMass(6), TokenKinds(), ExpectedAttention(GROUP)]
CPU = torch.device("cpu")
SHAPE = ModelShape(layers=1, kv_heads=HEADS, head_dim=2, element_bytes=4, group=GROUP)


def scores_of(steps: list[int], queries: int, seed: int) -> torch.Tensor:
    """Return ``[rows, heads, group, queries, slots]`` random scores; a row's query t sees the slots up to t."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(len(steps), HEADS, GROUP, queries, SLOTS, generator=generator)
    return scores.masked_fill(~sees(steps, queries).unsqueeze(1), float("-inf"))


def attention(steps: list[int], queries: int, seed: int) -> torch.Tensor:
    """Return ``[rows, heads, queries, slots]``, the attention of those scores."""
    return torch.softmax(scores_of(steps, queries, seed), dim=-1).mean(dim=2)


def sees(steps: list[int], queries: int) -> torch.Tensor:
    last = torch.tensor(steps).view(-1, 1, 1, 1) + torch.arange(queries).view(1, 1, -1, 1)
    return torch.arange(SLOTS) <= last


def seen_by(scores: torch.Tensor, steps: list[int]) -> Observation:
    """Return what the queries see that begin at ``steps``, where slot and position are the same."""
    queries = scores.shape[3]
    span = Span(slice(0, len(steps)), tuple(steps), tuple(steps), queries, CPU)
    scores = scores[..., : span.extent]
    positions = torch.arange(span.extent, dtype=torch.int32).expand(len(steps), HEADS, span.extent)
    kinds = ((torch.tensor(steps).unsqueeze(1) + torch.arange(queries)) % 3).to(torch.uint8)
    return Observation(torch.softmax(scores, dim=-1), span, scores, positions, kinds)


def single(probabilities: torch.Tensor, lengths, steps) -> Observation:
    """Return an observation of one query's attention alone, with one query head to a KV head."""
    positions = torch.arange(probabilities.shape[-1], dtype=torch.int32).expand(*probabilities.shape[:2], -1)
    attention = probabilities.unsqueeze(2)
    span = Span(slice(0, len(lengths)), lengths, steps, 1, CPU)
    return Observation(attention, span, attention.log(), positions)


def observe(signal: Signal, state: torch.Tensor, seen: Observation) -> None:
    """Let a signal observe, with the state of the slots in use, as a pool does."""
    signal.observe(state[:, :, : seen.span.extent], seen)


def value(signal: Signal, state: torch.Tensor, step: int = SLOTS) -> torch.Tensor:
    """Return the signal of a row whose slots are its positions and whose keys and values are ones."""
    heads, slots = state.shape[:2]
    ones = torch.ones(heads, slots, 4)
    return signal.value(state, Resident(ones, ones, torch.arange(slots).expand(heads, slots), step))


def low(probabilities: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Count the queries of ``[heads, queries, slots]`` from ``first`` to ``end`` that were below the average."""
    counts = torch.zeros(HEADS, SLOTS, dtype=torch.long)
    for query in range(max(0, first), end):
        counts[:, : query + 1] += probabilities[:, query, : query + 1] < 1 / torch.tensor(query + 1.0)
    return counts


def in_parts(total: int, parts: list[int]):
    """Yield the first query and the number of queries of parts that add up to ``total``."""
    done = 0
    for part in [*parts, *[1] * total]:
        size = min(part, total - done)
        if size:
            yield done, size
        done += size


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    window=st.sampled_from([2, 4, 6, 10, 34, 510]),
    parts=st.lists(st.integers(1, 20), max_size=8),
    total=st.integers(1, SLOTS),
    seed=st.integers(0, 99),
)
def test_counts_of_one_row_in_any_parts(window, parts, total, seed):
    scores = scores_of([0], total, seed)
    whole = torch.softmax(scores, dim=-1).mean(dim=2)
    signals = (Mass(), LowCount(window), LowCountRing(window), LastAttention(), WindowMass(window))
    states = [signal.allocate(1, HEADS, SLOTS, CPU) for signal in signals]
    for first, size in in_parts(total, parts):
        for signal, state in zip(signals, states, strict=True):
            observe(signal, state, seen_by(scores[:, :, :, first : first + size], [first]))

    start = max(0, (total - 1) // (window // 2) * (window // 2) - window // 2)
    mass, buckets, ring, last, window_mass = (
        value(signal, state[0]) for signal, state in zip(signals, states, strict=True)
    )
    torch.testing.assert_close(mass, whole[0].sum(dim=1))
    assert buckets.tolist() == low(whole[0], start, total).tolist()
    assert ring.tolist() == low(whole[0], total - window, total).tolist()
    torch.testing.assert_close(last, whole[0, :, total - 1])
    torch.testing.assert_close(window_mass, whole[0, :, start:total].sum(dim=1))


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 5, 11], [7, 1, 2]])
@pytest.mark.parametrize("size", [1, 4])
def test_rows_observed_together_are_as_if_observed_alone(signal, starts, size):
    together = signal.allocate(3, HEADS, SLOTS, CPU)
    alone = signal.allocate(3, HEADS, SLOTS, CPU)
    for done in range(0, 24, size):
        steps = [start + done for start in starts]
        scores = scores_of(steps, size, seed=done)
        observe(signal, together, seen_by(scores, steps))
        for row, step in enumerate(steps):
            observe(signal, alone[row : row + 1], seen_by(scores[row : row + 1], [step]))
    torch.testing.assert_close(together, alone)
    assert together.any()


def test_a_query_counts_for_no_slot_that_it_does_not_see():
    # The second row is shorter: its queries see two slots less, and give them nothing.
    probabilities = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.9, 0.1, 0, 0]]).view(2, 1, 1, 4)
    seen = single(probabilities, lengths=(3, 1), steps=(9, 9))
    state = LowCount(4).allocate(2, 1, 4, CPU)
    observe(LowCount(4), state, seen)
    assert torch.stack([value(LowCount(4), row) for row in state]).squeeze(1).tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    ring = LowCountRing(4).allocate(2, 1, 4, CPU)
    observe(LowCountRing(4), ring, seen)
    counts = torch.stack([value(LowCountRing(4), row) for row in ring]).squeeze(1)
    assert counts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]], "the average is 1/10"


def test_exactly_average_is_not_low():
    seen = single(torch.full((1, 1, 1, 4), 0.25), lengths=(3,), steps=(3,))
    for signal in (LowCount(4), LowCountRing(4)):
        state = signal.allocate(1, 1, 4, CPU)
        observe(signal, state, seen)
        assert not value(signal, state[0]).any()


def test_the_longest_window_does_not_overflow():
    signal = LowCount(510)
    state = signal.allocate(1, 1, 1, CPU)
    nothing = torch.zeros(1, 1, 1, 1)
    highest = 0
    for step in range(1100):
        observe(signal, state, single(nothing, lengths=(0,), steps=(step,)))
        highest = max(highest, int(value(signal, state[0])))
    assert highest == 510


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (PolicyRequest("scissorhands"), ["mass"]),
        (PolicyRequest("scissorhands", "counts"), ["mass", "low_count"]),
        (PolicyRequest("scissorhands", "paper"), ["mass", "low_count_ring"]),
        (PolicyRequest("h2o"), ["mass"]),
        (PolicyRequest("tova"), ["mass", "last_attention"]),
        (PolicyRequest("snapkv"), ["mass", "window_mass"]),
        (PolicyRequest("r-kv"), ["mass", "window_mass", "redundancy"]),
        (PolicyRequest("fastgen"), ["mass", "token_kind"]),
        (PolicyRequest("expected-attention"), ["mass", "expected_attention"]),
        (PolicyRequest("protected", "tova"), ["mass", "last_attention"]),
        (PolicyRequest("protected", "expected-attention"), ["mass", "expected_attention"]),
        (PolicyRequest("streaming"), ["mass"]),
        (PolicyRequest("full"), ["mass"]),
    ],
    ids=str,
)
def test_a_grant_names_its_signals_and_their_bytes(policy, names):
    granted = grant(BudgetRequest.tokens(64), policy, SHAPE)
    signals = signals_for(granted, GROUP)
    assert [signal.name for signal in signals] == names
    taken = sum(signal.allocate(1, 1, 1, CPU).nbytes for signal in signals)
    own = get_policy(granted.policy, granted.preset).evidence_bytes(granted.parameters, GROUP)
    position = 4
    assert taken + position == COMMON_EVIDENCE_BYTES + own


@pytest.mark.parametrize(
    ("policy", "preset", "window"),
    [
        ("scissorhands", "counts", 0),
        ("scissorhands", "counts", 1),
        ("scissorhands", "counts", 7),
        ("scissorhands", "counts", 512),
        ("scissorhands", "paper", 0),
        ("snapkv", "", 0),
        ("snapkv", "", 1),
        ("snapkv", "", 33),
        ("r-kv", "", 7),
        ("protected", "snapkv", 33),
    ],
)
def test_windows_that_the_signals_cannot_span_are_refused(policy, preset, window):
    with pytest.raises(InvalidRequestError, match=r"policy\.parameters\.window"):
        grant(BudgetRequest.tokens(64), PolicyRequest(policy, preset, {"window": window}), SHAPE)


def test_the_window_mass_spans_the_window_that_was_granted():
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("snapkv", "", {"window": 10}), SHAPE)
    signal = signals_for(granted, 1)[1]
    state = signal.allocate(1, 1, 1, CPU)
    values = []
    for step in range(20):
        observe(signal, state, single(torch.ones(1, 1, 1, 1), lengths=(0,), steps=(step,)))
        values.append(int(value(signal, state[0])))
    assert values == [*range(1, 11), *range(6, 11), *range(6, 11)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(parts=st.lists(st.integers(1, 20), max_size=8), total=st.integers(5, SLOTS), seed=st.integers(0, 99))
def test_expected_attention_is_that_of_a_gaussian_with_the_scores_mean_and_variance(parts, total, seed):
    signal = ExpectedAttention(GROUP)
    scores = scores_of([0], total, seed)
    state = signal.allocate(1, HEADS, SLOTS, CPU)
    for first, size in in_parts(total, parts):
        observe(signal, state, seen_by(scores[:, :, :, first : first + size], [first]))
    values = torch.randn(HEADS, total, 4, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(total).expand(HEADS, total)
    actual = signal.value(state[0, :, :total], Resident(values, values, positions, total))

    expected = torch.zeros(HEADS, total)
    for head in range(HEADS):
        shares = torch.zeros(GROUP, total)
        for query_head in range(GROUP):
            # The scores that token t got from the queries t and later; the first four tokens stay out.
            seen = [scores[0, head, query_head, token:, token].double() for token in range(total)]
            weights = [float((got.mean() + got.var(correction=0) / 2).exp()) for got in seen]
            shares[query_head, 4:] = torch.tensor(weights[4:]) / sum(weights[4:])
        expected[head] = shares.mean(dim=0) * values[head].norm(dim=-1)
    torch.testing.assert_close(actual, expected)


def test_expected_attention_of_the_first_tokens_alone_is_nothing():
    signal = ExpectedAttention(GROUP)
    state = signal.allocate(1, HEADS, 3, CPU)
    observe(signal, state, seen_by(scores_of([0], 3, seed=1)[..., :3], [0]))
    assert value(signal, state[0], step=3).tolist() == [[0, 0, 0]] * HEADS


def test_redundancy_of_four_keys():
    # Slots 0, 1 and 3 point the same way, slot 2 across.
    keys = torch.tensor([[[1, 0], [2, 0], [0, 1], [3, 0]]]).float()
    signal = Redundancy()
    state = signal.allocate(1, 1, 4, CPU)
    assert state.numel() == 0
    # Each of 0 and 1 spares its link to 3, and 3 its link to 1; what is left is 1 to 0, 0 to 1 and 3 to 0.
    found = signal.value(state[0], Resident(keys, keys, torch.arange(4).unsqueeze(0), 4))
    assert found.tolist() == [[2 / 4, 1 / 4, 0, 0]]


def test_redundancy_is_the_same_whatever_the_block(monkeypatch):
    keys = torch.randn(HEADS, 37, 4, generator=torch.Generator().manual_seed(3))
    resident = Resident(keys, keys, torch.arange(37).expand(HEADS, 37), 37)
    state = Redundancy().allocate(1, HEADS, 37, CPU)[0]
    whole = Redundancy().value(state, resident)
    monkeypatch.setattr("scissorhands.signals.redundancy._BLOCK", 5)
    torch.testing.assert_close(Redundancy().value(state, resident), whole)
    assert whole.any()


def test_kinds_that_nobody_tells_are_missed():
    state = TokenKinds().allocate(1, 1, 4, CPU)
    with pytest.raises(InvalidRequestError, match="tell_kinds"):
        observe(TokenKinds(), state, single(torch.ones(1, 1, 1, 1), lengths=(0,), steps=(0,)))
