"""Bytes on their way: the engine's thread waits for them, never for long, and their memory is given back once."""

import asyncio
import threading
import time

import pytest

from scissorhands.errors import CorruptRowError
from scissorhands.suspended import Part, describe
from scissorhands.v1 import suspension_pb2
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.memory import Memory


class Counter:
    """Stands in for a metric."""

    def __init__(self):
        self.value = 0

    def inc(self, amount):
        self.value += amount


class Stream:
    """A stream of chunks, each sent when it is let go."""

    def __init__(self, *chunks):
        self._chunks = list(chunks)
        self.go = asyncio.Semaphore(0)

    async def read(self):
        await self.go.acquire()
        return suspension_pb2.ResumeSessionResponse(chunk=self._chunks.pop(0))


@pytest.fixture
def held():
    return []


@pytest.fixture
def memory(held):
    return Memory(100, held.append)


def arrival_of(memory, *sizes):
    assert memory.take(sum(sizes))
    return Arrival(sizes, memory)


def parts_of(*pieces):
    return list(enumerate(describe([memoryview(piece) for piece in pieces])))


async def test_what_has_come_can_be_used_while_the_rest_comes(memory, held):
    arrival, stream, received = arrival_of(memory, 6, 4), Stream(b"abc", b"def", b"ghij"), Counter()
    filling = arrival.fill(arrival.receive(stream, parts_of(b"abcdef", b"ghij"), received))
    stream.go.release()
    assert not await asyncio.to_thread(arrival.wait, [1, 0], 0.05)  # No part of it has been checked.
    waiting = asyncio.create_task(asyncio.to_thread(arrival.wait, [6, 0], 30))
    stream.go.release()
    assert await waiting
    assert bytes(arrival.buffers[0]) == b"abcdef"
    assert (arrival.whole, arrival.over, received.value) == (False, False, 6)
    stream.go.release()
    await arrival.ended()
    assert (arrival.whole, arrival.over, filling.exception()) == (True, True, None)
    assert arrival.wait([6, 4], 0)
    arrival.close()
    arrival.close()
    assert held == [10, 0]


async def test_nobody_waits_for_what_will_not_come(memory, held):
    arrival, stream = arrival_of(memory, 3), Stream(b"abd")
    filling = arrival.fill(arrival.receive(stream, parts_of(b"abc"), Counter()))
    waiting = asyncio.create_task(asyncio.to_thread(arrival.wait, [3], 30))
    stream.go.release()
    assert not await waiting
    assert isinstance(filling.exception(), CorruptRowError)
    assert (arrival.whole, arrival.over) == (False, True)
    arrival.close()
    assert held == [3, 0]


async def test_memory_is_given_back_when_nothing_writes_to_it_any_more(memory, held):
    """Closed from another thread, as the engine does when its client has gone."""
    arrival, stream = arrival_of(memory, 3), Stream(b"abc")
    filling = arrival.fill(arrival.receive(stream, [(0, Part(3, 0))], Counter()))
    await asyncio.sleep(0)
    thread = threading.Thread(target=arrival.close)
    thread.start()
    thread.join()
    assert held == [3]
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert (arrival.over, arrival.whole, held) == (True, False, [3, 0])


async def test_what_was_never_begun_is_closed_too(memory, held):
    arrival_of(memory, 3).close()
    assert held == [3, 0]


async def test_a_wait_ends(memory):
    arrival, began = arrival_of(memory, 3), time.monotonic()
    assert not arrival.wait([3], 0.05)
    assert time.monotonic() - began >= 0.05
