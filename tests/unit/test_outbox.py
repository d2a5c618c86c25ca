"""The outbox: events come in their order, and those of a burst together."""

import asyncio

import pytest

from scissorhands_server.worker.outbox import Outbox


class CountingLoop:
    """A loop that is woken by hand."""

    def __init__(self) -> None:
        self.woken = []

    def call_soon_threadsafe(self, call, *arguments):
        self.woken.append((call, arguments))

    def run(self):
        for call, arguments in self.woken:
            call(*arguments)


def test_a_burst_wakes_the_loop_once_and_keeps_the_order():
    loop, first, second = CountingLoop(), asyncio.Queue(), asyncio.Queue()
    outbox = Outbox(loop)
    outbox.put(first, 1)
    with outbox.burst():
        outbox.put(first, 2)
        outbox.put(second, 3)
        outbox.put(first, 4)
        assert len(loop.woken) == 1
    assert len(loop.woken) == 2
    outbox.put(second, 5)
    loop.run()
    assert [first.get_nowait() for _ in range(first.qsize())] == [1, 2, 4]
    assert [second.get_nowait() for _ in range(second.qsize())] == [3, 5]


def test_a_burst_that_fails_sends_what_it_has_and_an_empty_one_wakes_nobody():
    loop, queue = CountingLoop(), asyncio.Queue()
    outbox = Outbox(loop)

    def fail():
        with outbox.burst():
            outbox.put(queue, 1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with outbox.burst():
        pass
    assert len(loop.woken) == 1
    loop.run()
    assert queue.get_nowait() == 1
