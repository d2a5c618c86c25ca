"""How many prompt tokens are read between two decode steps."""

import pytest

from scissorhands_server.worker.allowance import Allowance

LAYERS = 30


def between_steps(allowance: Allowance, chunks: list[int], decoding: int) -> list[float]:
    """Return how many tokens are read before each step of the rows that decode, chunks being read layer by layer."""
    allowance.begin(decoding)
    read = [0.0]
    for chunk in chunks:
        for _ in range(LAYERS):
            if allowance.spent:
                allowance.begin(decoding)
                read.append(0.0)
            allowance.spend(chunk / LAYERS)
            read[-1] += chunk / LAYERS
    return read


@pytest.mark.parametrize("chunks", [[48] * 20, [16, 100] * 10, [7, 33, 250] * 5, [1]])
@pytest.mark.parametrize("decoding", [1, 8, 63, 64, 1000])
def test_a_step_reads_what_the_rows_that_decode_leave_of_it_and_at_most_a_layer_more(chunks, decoding):
    left = max(1, 64 - decoding)
    *steps, _ = read = between_steps(Allowance(64), chunks, decoding)
    assert sum(read) == pytest.approx(sum(chunks))
    assert all(left <= tokens + 1e-6 and tokens <= left + max(chunks) / LAYERS + 1e-6 for tokens in steps)


def test_nothing_is_saved_while_nobody_reads():
    allowance = Allowance(64)
    for _ in range(100):
        allowance.begin(decoding=4)
    allowance.spend(59)
    assert not allowance.spent
    allowance.spend(1)
    assert allowance.spent


def test_before_the_first_step_nothing_may_be_read():
    assert Allowance(64).spent
