"""A store, managers and workers as real processes, with lines between them on which anything may go wrong."""

import asyncio
import signal
from contextlib import AsyncExitStack, suppress

import psutil
from support.faults.clock import JumpingClock
from support.faults.line import Line
from support.faults.worker import WorkerProcess
from support.processes import ManagerProcess, RedisProcess, wait_for
from support.tiny_worker import tiny_folder

# What is left of a fault is gone within this time: far above leases and deadlines, as set below.
SETTLE_SECONDS = 40
LEASE = 2
WORKER = {
    "rows": 4,
    "queue": 64,
    "grace": 2,
    "suspend_deadline": 1,
    "prefix_tokens": 32,
    "prefix_advantage": 0,
    "log_level": "warning",
}
MANAGER = {
    "lease": LEASE,
    "retention": 2,
    "segment_ttl": 15,
    "suspend_ttl": 60,
    "prefix_ttl": 60,
    "store_timeout": 0.5,
    "janitor_interval": 2,
    "log_level": "error",
}
# Gauges that are zero when nobody asks for anything.
WORKER_GAUGES = (
    "queue_requests",
    "rows",
    "preempted_rows",
    "cache_slots",
    "cache_budget_slots",
    "cache_allocated_bytes",
    "cache_packed_bytes",
    "cache_full_bytes",
    "segment_queue_bytes",
    "suspension_held_bytes",
    "shadow_reserved_bytes",
)
MANAGER_GAUGES = ('sessions{state="open"}',)


class Lane:
    """A worker with a manager of its own, and the lines to them.

    Args:
        number: Which of the stack's.
        folder: For logs and clocks.
        store_port: Port of the store.
    """

    def __init__(self, number, folder, store_port):
        self.name, self._folder = f"{number}", folder
        self.to_store = Line(store_port, number)
        self.clock = JumpingClock(folder / f"clock-{number}")

    async def start(self, exits):
        """Start everything; ``exits`` ends it."""
        await exits.enter_async_context(self.to_store)
        store = f"redis://127.0.0.1:{self.to_store.port}/0"
        self.manager = await asyncio.to_thread(ManagerProcess, self.clock, store_url=store, **MANAGER)
        exits.callback(self.manager.stop)
        self.to_manager = await exits.enter_async_context(Line(self.manager.port))
        self.worker = await asyncio.to_thread(
            WorkerProcess,
            tiny_folder(),
            self._folder / f"worker-{self.name}.log",
            self.clock,
            manager=self.to_manager.address,
            **WORKER,
        )
        exits.callback(self.worker.stop)
        self.to_worker = await exits.enter_async_context(Line(self.worker.port))
        self.lines = (self.to_store, self.to_manager, self.to_worker)

    @property
    def address(self):
        """Where clients find the worker."""
        return self.to_worker.address

    async def heal(self):
        """Mend every line, let go on what is stopped, start what is gone, and set the clock right."""
        for line in self.lines:
            line.heal()
        self.clock.jump(0)
        for part in (self.manager, self.worker):
            part.send(signal.SIGCONT)
        if self.manager.ended():
            await asyncio.to_thread(self.manager.restart)
        if self.worker.ended():
            await asyncio.to_thread(self.worker.start)

    def is_whole(self):
        """Tell whether worker, manager and store know of each other."""
        return self.worker.metrics()["manager_up"] == 1 and self.manager.metric("store_up") == 1

    def gauges(self):
        """Return the gauges that are not zero, though nobody asks for anything."""
        found = self.worker.metrics()
        worker = {f"worker {name}": found[name] for name in WORKER_GAUGES if found[name]}
        manager = {f"manager {name}": value for name in MANAGER_GAUGES if (value := self.manager.metric(name))}
        return worker | manager


class Stack:
    """One store and two lanes. Use it as an async context manager.

    Args:
        folder: For the files of the processes.
    """

    def __init__(self, folder):
        self.folder = folder
        # Bounded, as a store should be, and far from it.
        self.redis = RedisProcess(folder, "--maxmemory", "256mb")

    async def __aenter__(self):
        async with AsyncExitStack() as exits:
            await asyncio.to_thread(self.redis.start)
            exits.callback(self.redis.stop)
            self.lanes = [Lane(number, self.folder, self.redis.port) for number in range(2)]
            for lane in self.lanes:
                await lane.start(exits)
            await until(self.is_whole, "the parts to find each other")
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exception):
        await self._exits.aclose()

    async def heal(self):
        """Take every fault away, and wait until all parts know of each other again."""
        self.redis.resume()
        if self.redis.ended():
            await asyncio.to_thread(self.redis.start)
        for lane in self.lanes:
            await lane.heal()
        await until(self.is_whole, "the parts to find each other again")

    def is_whole(self):
        """Tell whether all parts know of each other."""
        return all(lane.is_whole() for lane in self.lanes)

    def gauges(self):
        """Return the gauges that are not zero, though nobody asks for anything, by part."""
        return {f"{lane.name} {name}": value for lane in self.lanes for name, value in lane.gauges().items()}

    def processes(self):
        """Return the ids of the processes by name."""
        parts = [(kind, lane) for lane in self.lanes for kind in ("manager", "worker")]
        return {f"{kind} {lane.name}": getattr(lane, kind).pid for kind, lane in parts}

    def usage(self):
        """Return the resident bytes and the open descriptors of each process that runs, by its name and id."""
        found = {}
        for name, pid in self.processes().items():
            with suppress(psutil.Error):  # It was killed a moment ago.
                process = psutil.Process(pid)
                found[name, pid] = (process.memory_info().rss, process.num_fds())
        return found


async def until(condition, what, seconds=SETTLE_SECONDS):
    """Wait until ``condition()`` is true; what cannot be asked yet is not.

    Raises:
        AssertionError: That takes too long.
    """

    def holds():
        try:
            return condition()
        except OSError:
            return False

    await asyncio.to_thread(wait_for, holds, what, seconds)
