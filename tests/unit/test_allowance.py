"""How many prompt tokens are read between two decode steps."""

import pytest

from scissorhands_server.worker.allowance import Allowance


def steps(allowance: Allowance, chunks: list[int], decoding: int, count: int) -> list[list[int]]:
    """Return what ``count`` steps read of ``chunks``, in order."""
    left, read = list(chunks), []
    for _ in range(count):
        allowance.begin(decoding)
        read.append([])
        while left and allowance.covers(left[0]):
            allowance.spend(left[0])
            read[-1].append(left.pop(0))
    return read


def test_a_step_reads_what_the_rows_that_decode_leave_of_it():
    assert steps(Allowance(100), [32] * 8, decoding=4, count=3) == [[32] * 3] * 2 + [[32] * 2]


def test_a_chunk_that_is_larger_waits_and_stays_whole():
    # 60 tokens a step are left: 60, 120, 180 and 200 is covered by the fourth.
    assert steps(Allowance(64), [200, 10, 10], decoding=4, count=5) == [[], [], [], [200, 10, 10], []]


@pytest.mark.parametrize("chunks", [[48] * 200, [16, 100] * 60, [7, 33, 250] * 30])
def test_in_the_long_run_a_step_reads_no_more_than_its_allowance(chunks):
    count = 60
    read = steps(Allowance(64), chunks, decoding=8, count=count)
    whole = sum(map(sum, read))
    assert whole <= 56 * count
    assert whole > 56 * count - 2 * max(chunks)
    assert max(map(sum, read)) <= 56 + max(chunks)


def test_nothing_is_saved_while_nobody_reads():
    allowance = Allowance(64)
    for _ in range(100):
        allowance.begin(decoding=4)
    assert not allowance.covers(61)
    assert allowance.covers(60)


def test_however_many_rows_decode_a_chunk_comes_to_be_read():
    assert steps(Allowance(8), [3], decoding=1000, count=3) == [[], [], [3]]


def test_if_nothing_decodes_the_first_chunk_may_be_of_any_size():
    assert steps(Allowance(8), [512, 4, 4, 4], decoding=0, count=2) == [[512], [4, 4]]
