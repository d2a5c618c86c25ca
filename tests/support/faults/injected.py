"""Faults to inject for a while: what goes wrong with one lane, or with the store of both."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from support.faults.stack import until

_DAY = 86_400.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for a while.

    Args:
        name: Its name.
        hold: Given a stack and one of its lanes, an async context manager that is left when the fault is gone.
        felt: Whether clients may be told of it, and so need not be answered at once.
        kills: Whether a manager or a worker begins anew after it.
    """

    name: str
    hold: Callable[[Any, Any], Any]
    felt: bool = False
    kills: bool = False


def _faults(*functions, felt=False, kills=False):
    named = [(function.__name__.removeprefix("_").replace("_", "-"), function) for function in functions]
    return {name: Fault(name, _held(function), felt, kills) for name, function in named}


def _held(function):
    """Return an async context manager of a generator, of which what follows its yield is done whatever happens."""

    @asynccontextmanager
    async def hold(stack, lane):
        steps = function(stack, lane)
        await anext(steps)
        try:
            yield
        finally:
            await anext(steps, None)

    return hold


async def _until_writes_are_refused(redis):
    """Wait until a fault of the store has taken hold."""
    await until(lambda: redis.command("SET", "probe", "x").startswith(b"-"), "the store to refuse writes", 10)


async def _set(redis, setting, value):
    reply = await asyncio.to_thread(redis.command, "CONFIG", "SET", setting, value)
    assert reply == b"+OK\r\n", f"CONFIG SET {setting}: {reply!r}"


async def _manager_killed(stack, lane):
    await asyncio.to_thread(lane.manager.kill)
    yield
    await asyncio.to_thread(lane.manager.restart)


async def _manager_terminated(stack, lane):
    status = await asyncio.to_thread(lane.manager.terminate)
    assert status == 0, f"the manager ended with {status}"
    yield
    await asyncio.to_thread(lane.manager.restart)


async def _manager_stopped(stack, lane):
    lane.manager.send(signal.SIGSTOP)
    yield
    lane.manager.send(signal.SIGCONT)


async def _worker_killed(stack, lane):
    await asyncio.to_thread(lane.worker.kill)
    yield
    await asyncio.to_thread(lane.worker.start)


async def _worker_terminated(stack, lane):
    status = await asyncio.to_thread(lane.worker.terminate)
    assert status == 0, f"the worker ended with {status}"
    yield
    await asyncio.to_thread(lane.worker.start)


async def _worker_stopped(stack, lane):
    lane.worker.send(signal.SIGSTOP)
    yield
    lane.worker.send(signal.SIGCONT)


async def _store_killed(stack, lane):
    await asyncio.to_thread(stack.redis.kill)
    yield
    await asyncio.to_thread(stack.redis.start)


async def _store_stopped(stack, lane):
    stack.redis.pause()
    yield
    stack.redis.resume()


async def _store_emptied(stack, lane):
    await asyncio.to_thread(stack.redis.command, "FLUSHALL")
    yield


def _configured(name, *, setting, value, usual):
    """Return a fault that is a setting of Redis's for a while."""

    async def hold(stack, lane):
        await _set(stack.redis, setting, value)
        await _until_writes_are_refused(stack.redis)
        yield
        await _set(stack.redis, setting, usual)
        await asyncio.to_thread(stack.redis.command, "DEL", "probe")

    hold.__name__ = name
    return hold


_store_out_of_memory = _configured("store_out_of_memory", setting="maxmemory", value="1mb", usual="256mb")
# As a replica that takes no writes: too few others follow.
_store_read_only = _configured("store_read_only", setting="min-replicas-to-write", value="1", usual="0")


async def _store_disk_full(stack, lane):
    """Redis cannot write its snapshots, so that by its usual settings it takes no more writes."""
    process, redis = psutil.Process(stack.redis.pid), stack.redis
    usual = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (64, usual[1]))
    await _set(redis, "save", "1 1")
    await asyncio.to_thread(redis.command, "BGSAVE")
    await _until_writes_are_refused(redis)
    yield
    process.rlimit(psutil.RLIMIT_FSIZE, usual)
    await _set(redis, "save", "")
    # After a snapshot that succeeds it takes writes again.
    await asyncio.to_thread(redis.command, "BGSAVE")
    await until(lambda: redis.command("DEL", "probe").startswith(b":"), "the store to take writes again", 10)


def _line_fault(name, line, **changes):
    """Return a fault that changes a line of the lane."""

    async def hold(stack, lane):
        chosen = getattr(lane, line)
        for attribute, value in changes.items():
            setattr(chosen, attribute, value)
        yield
        chosen.heal()

    hold.__name__ = name
    return hold


def _line_cut(name, line):
    """Return a fault that resets the connections of a line again and again."""

    async def hold(stack, lane):
        chosen = getattr(lane, line)

        async def cut():
            while True:
                chosen.cut()
                await asyncio.sleep(0.3)

        cutting = asyncio.create_task(cut())
        try:
            yield
        finally:
            cutting.cancel()

    hold.__name__ = name
    return hold


def _line_refusing(name, line):
    """Return a fault that resets all connections of a line and lets no new ones in."""

    async def hold(stack, lane):
        chosen = getattr(lane, line)
        chosen.refuses = True
        chosen.cut()
        yield
        chosen.heal()

    hold.__name__ = name
    return hold


def _clock_jump(name, seconds):
    """Return a fault that sets the clock of the manager and of the worker wrong."""

    async def hold(stack, lane):
        lane.clock.jump(seconds)
        yield
        lane.clock.jump(0)

    hold.__name__ = name
    return hold


def _line_faults(part):
    line = f"to_{part}"
    return (
        _line_fault(f"{part}_far", line, delay=0.1),
        _line_fault(f"{part}_behind_a_narrow_line", line, rate=50_000),
        _line_fault(f"{part}_behind_a_lossy_line", line, loss=0.1),
        _line_fault(f"{part}_partitioned", line, dead=True),
        _line_cut(f"{part}_connections_cut", line),
        _line_refusing(f"{part}_refusing", line),
    )


# Clients notice only those that end connections or hold them up for long.
_CLIENT_LINE = _line_faults("worker")

FAULTS = {
    **_faults(_manager_killed, _manager_terminated, kills=True),
    **_faults(_worker_killed, _worker_terminated, kills=True, felt=True),
    **_faults(_manager_stopped, *_line_faults("manager"), *_line_faults("store")),
    **_faults(_worker_stopped, *_CLIENT_LINE[3:], felt=True),
    **_faults(*_CLIENT_LINE[:3]),
    **_faults(_store_killed, _store_stopped, _store_emptied, _store_out_of_memory, _store_read_only, _store_disk_full),
    **_faults(_clock_jump("clock_a_day_ahead", _DAY), _clock_jump("clock_a_day_behind", -_DAY)),
}
