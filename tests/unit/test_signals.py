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
from scissorhands.signals.base import Observation, Signal
from scissorhands.signals.last_attention import LastAttention
from scissorhands.signals.low_count import LowCount
from scissorhands.signals.low_count_ring import LowCountRing
from scissorhands.signals.mass import Mass
from scissorhands.signals.window_mass import WindowMass

HEADS, SLOTS = 2, 40
SIGNALS = [Mass(), LowCount(6), LowCountRing(6), LastAttention(), WindowMass(6)]
CPU = torch.device("cpu")
SHAPE = ModelShape(layers=1, kv_heads=HEADS, head_dim=2, element_bytes=4)


def attention(steps: list[int], queries: int, seed: int) -> torch.Tensor:
    """Return ``[rows, heads, queries, slots]`` random attention; a row's query t sees the slots up to t."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(len(steps), HEADS, queries, SLOTS, generator=generator)
    return torch.softmax(scores.masked_fill(~sees(steps, queries), float("-inf")), dim=-1)


def sees(steps: list[int], queries: int) -> torch.Tensor:
    last = torch.tensor(steps).view(-1, 1, 1, 1) + torch.arange(queries).view(1, 1, -1, 1)
    return torch.arange(SLOTS) <= last


def observe(signal: Signal, state: torch.Tensor, probabilities: torch.Tensor, steps: list[int]) -> None:
    """Show a signal the queries that begin at ``steps``, where slot and position are the same."""
    queries = probabilities.shape[2]
    extent = max(steps) + queries
    visible = None if queries == 1 and len(set(steps)) == 1 else sees(steps, queries)[..., :extent]
    lengths = tuple(step + 1 for step in steps)
    signal.observe(state, Observation(probabilities[..., :extent], visible, lengths, tuple(steps)))


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
    whole = attention([0], total, seed)
    signals = (Mass(), LowCount(window), LowCountRing(window), LastAttention(), WindowMass(window))
    states = [signal.allocate(1, HEADS, SLOTS, CPU) for signal in signals]
    for first, size in in_parts(total, parts):
        for signal, state in zip(signals, states, strict=True):
            observe(signal, state, whole[:, :, first : first + size], [first])

    start = max(0, (total - 1) // (window // 2) * (window // 2) - window // 2)
    mass, buckets, ring, last, window_mass = (
        signal.value(state[0]) for signal, state in zip(signals, states, strict=True)
    )
    torch.testing.assert_close(mass, whole[0].sum(dim=1))
    assert buckets.tolist() == low(whole[0], start, total).tolist()
    assert ring.tolist() == low(whole[0], total - window, total).tolist()
    assert last.tolist() == whole[0, :, total - 1].tolist()
    torch.testing.assert_close(window_mass, whole[0, :, start:total].sum(dim=1))


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 5, 11], [7, 1, 2]])
@pytest.mark.parametrize("size", [1, 4])
def test_rows_observed_together_are_as_if_observed_alone(signal, starts, size):
    together = signal.allocate(3, HEADS, SLOTS, CPU)
    alone = signal.allocate(3, HEADS, SLOTS, CPU)
    for done in range(0, 24, size):
        steps = [start + done for start in starts]
        probabilities = attention(steps, size, seed=done)
        observe(signal, together, probabilities, steps)
        for row, step in enumerate(steps):
            observe(signal, alone[row : row + 1], probabilities[row : row + 1], [step])
    torch.testing.assert_close(together, alone)
    assert together.any()


def test_a_query_counts_for_no_slot_that_it_does_not_see():
    # The second row is shorter: its queries see two slots less, and give them nothing.
    visible = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool().view(2, 1, 1, 4)
    probabilities = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.9, 0.1, 0, 0]]).view(2, 1, 1, 4)
    seen = Observation(probabilities, visible, lengths=(4, 2), steps=(9, 9))
    state = LowCount(4).allocate(2, 1, 4, CPU)
    LowCount(4).observe(state, seen)
    assert LowCount(4).value(state).squeeze(1).tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    ring = LowCountRing(4).allocate(2, 1, 4, CPU)
    LowCountRing(4).observe(ring, seen)
    assert LowCountRing(4).value(ring).squeeze(1).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]], "the average is 1/10"


def test_exactly_average_is_not_low():
    seen = Observation(torch.full((1, 1, 1, 4), 0.25), None, lengths=(4,), steps=(3,))
    for signal in (LowCount(4), LowCountRing(4)):
        state = signal.allocate(1, 1, 4, CPU)
        signal.observe(state, seen)
        assert not signal.value(state).any()


def test_the_longest_window_does_not_overflow():
    signal = LowCount(510)
    state = signal.allocate(1, 1, 1, CPU)
    nothing = torch.zeros(1, 1, 1, 1)
    highest = 0
    for step in range(1100):
        signal.observe(state, Observation(nothing, None, lengths=(1,), steps=(step,)))
        highest = max(highest, int(signal.value(state)))
    assert highest == 510


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (PolicyRequest("scissorhands"), ["mass", "low_count"]),
        (PolicyRequest("scissorhands", "paper"), ["mass", "low_count_ring"]),
        (PolicyRequest("h2o"), ["mass"]),
        (PolicyRequest("tova"), ["mass", "last_attention"]),
        (PolicyRequest("snapkv"), ["mass", "window_mass"]),
        (PolicyRequest("streaming"), ["mass"]),
        (PolicyRequest("full"), ["mass"]),
    ],
    ids=str,
)
def test_a_grant_names_its_signals_and_their_bytes(policy, names):
    granted = grant(BudgetRequest.tokens(64), policy, SHAPE)
    signals = signals_for(granted)
    assert [signal.name for signal in signals] == names
    taken = sum(signal.allocate(1, 1, 1, CPU).nbytes for signal in signals)
    own = get_policy(granted.policy, granted.preset).signals(granted.parameters)
    position = 4
    assert taken + position == COMMON_EVIDENCE_BYTES + sum(own.values())


@pytest.mark.parametrize(
    ("policy", "preset", "window"),
    [
        ("scissorhands", "", 0),
        ("scissorhands", "", 1),
        ("scissorhands", "", 7),
        ("scissorhands", "", 512),
        ("scissorhands", "paper", 0),
        ("snapkv", "", 0),
        ("snapkv", "", 1),
        ("snapkv", "", 33),
    ],
)
def test_windows_that_the_signals_cannot_span_are_refused(policy, preset, window):
    with pytest.raises(InvalidRequestError, match=r"policy\.parameters\.window"):
        grant(BudgetRequest.tokens(64), PolicyRequest(policy, preset, {"window": window}), SHAPE)


def test_the_window_mass_spans_the_window_that_was_granted():
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("snapkv", "", {"window": 10}), SHAPE)
    signal = signals_for(granted)[1]
    state = signal.allocate(1, 1, 1, CPU)
    values = []
    for step in range(20):
        seen = Observation(torch.ones(1, 1, 1, 1), None, lengths=(1,), steps=(step,))
        signal.observe(state, seen)
        values.append(int(signal.value(state)))
    assert values == [*range(1, 11), *range(6, 11), *range(6, 11)]
