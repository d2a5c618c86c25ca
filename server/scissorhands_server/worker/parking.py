"""Rows that make room for more urgent requests: put away in the host's memory, and brought back as they were.

A row's whole state goes, and what it is about to evict: the snapshot in flight and the plan that was asked for. So it
goes on exactly where it was. Reading its prompt and its answer anew would not do: what was decoded token by token would
be read, and evicted from, in the chunks of a prompt, and other slots would be kept. A row for which there is no memory
stays where it is, and is asked again after a while: memory is free again when other rows have come back, or are stored.
"""

import logging
import time

from scissorhands.errors import EngineError
from scissorhands.row_state import restore, state_bytes
from scissorhands_server.worker.kept_row import KeptRow, ParkedRow
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.parking_metrics import ParkingMetrics
from scissorhands_server.worker.task import Task

LOGGER = logging.getLogger(__name__)


class Parking:
    """Puts the rows of tasks away and brings them back. Only the engine's thread uses it.

    Args:
        memory: What bounds the bytes of rows on the host.
        metrics: Where what becomes of rows is counted.
    """

    def __init__(self, memory: Memory, metrics: ParkingMetrics) -> None:
        self._memory = memory
        self._metrics = metrics

    def put(self, task: Task, lacks: str) -> bool:
        """Copy the state of a task's row to the host; the row itself stays. False if that cannot be.

        Args:
            task: The task, between two forward passes.
            lacks: What there is no room in: ``rows`` or ``bytes``.
        """
        if task.arriving:  # What it begins with is still on its way, and soon here.
            self._metrics.preemptions.labels("coming", lacks).inc()
            return False
        row, size = task.seat, state_bytes(task.seat)
        if not self._memory.take(size):
            self._metrics.preemptions.labels("no_memory", lacks).inc()
            return False
        try:
            task.parked = ParkedRow(KeptRow.of(row, task.ids), row.pending, time.monotonic())
        except (RuntimeError, EngineError):  # Torch's out-of-memory errors. The row is as it was.
            LOGGER.exception("the row of session %s could not be put away", task.session_id)
            self._memory.give_back(size)
            self._metrics.preemptions.labels("failed", lacks).inc()
            return False
        self._metrics.preemptions.labels("put_away", lacks).inc()
        self._metrics.parked.inc()
        return True

    def bring_back(self, task: Task) -> None:
        """Put what was put away into a task's row, still empty.

        Raises:
            CorruptRowError: It does not fit.
        """
        parked, row = task.parked, task.seat
        assert parked is not None
        restore(row, parked.kept, parked.kept.data, task.ids[: parked.kept.step])
        row.pending = parked.pending
        self.drop(task)

    def keep(self, task: Task) -> None:
        """Leave what was put away to the next turn of its session, if there will be one."""
        if task.parked and task.turn and not task.cancelled:
            task.turn.kept = task.parked.kept
            self._gone(task.parked)
            task.parked = None

    def drop(self, task: Task) -> None:
        """Free what was put away; if nothing is, that is no error."""
        if task.parked:
            self._memory.give_back(len(task.parked.kept.data))
            self._gone(task.parked)
            task.parked = None

    def _gone(self, parked: ParkedRow) -> None:
        self._metrics.parked.dec()
        self._metrics.away.observe(time.monotonic() - parked.since)
