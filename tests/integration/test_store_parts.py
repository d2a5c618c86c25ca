"""What parts of rows take in Redis's memory, by its own account."""

import random

import pytest

from scissorhands.suspended import PART_BYTES, cut

KEY = "scissorhands:{default/s1}:suspended:1764690000000:0"
# What a key and its end take, for a part at most.
_KEY_BYTES = 256


def memory(redis, size):
    """Return what a value takes, its key included."""
    redis.command("SET", KEY, bytes(size), "PX", "60000")
    return int(redis.command("MEMORY", "USAGE", KEY)[1:])


def test_a_part_of_a_power_of_two_would_take_a_quarter_more(redis_server):
    assert memory(redis_server, PART_BYTES) > 1.24 * PART_BYTES
    (part,) = cut(memoryview(bytes(PART_BYTES - 64)))
    assert memory(redis_server, len(part)) < 1.001 * PART_BYTES


@pytest.mark.parametrize("most", [300_000, 3 << 20, 12 << 20])
def test_rows_take_little_more_than_their_bytes(redis_server, most):
    chance = random.Random(most)
    for _ in range(8):
        data = memoryview(bytes(chance.randrange(most // 3, most)))
        pieces = cut(data)
        assert sum(map(len, pieces)) == len(data)
        assert len(pieces) <= len(data) // PART_BYTES + 4
        taken = sum(memory(redis_server, len(piece)) for piece in pieces)
        assert taken <= len(data) * 33 / 32 + (32 << 10) + len(pieces) * _KEY_BYTES
