"""Rows that begin with what comes from the store: put in place as it comes, while their first new tokens are read.

A row's next tokens can be read layer by layer as the row's slots come (:mod:`scissorhands.incoming`). The engine's
thread waits for slots only while nothing else could go on, and briefly: a row whose slots do not keep up is held until
all have come. If they never do, the row begins anew, empty.
"""

import logging
import time

import torch

from scissorhands.cache import ResidentCache
from scissorhands.errors import CorruptRowError
from scissorhands.step import ModelStep
from scissorhands.view import Before
from scissorhands_server.worker.arriving import LAYER_SECONDS, Arriving, LateError
from scissorhands_server.worker.task import Task

LOGGER = logging.getLogger(__name__)


class Arrivals:
    """Lets rows begin. Lives in the engine's thread.

    Args:
        step: Runs forward passes.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step

    def begin(self, task: Task) -> None:
        """Let a task's empty row begin with what has come for it, or is on its way."""
        for beginning in task.beginnings:
            found = beginning.incoming(task.seat, task.ids)
            if found is not None:
                task.arriving = Arriving(beginning, *found)
                task.arriving.incoming.begin()

    def holds(self, cache: ResidentCache, task: Task, *, alone: bool) -> bool:
        """Tell whether a task cannot read its prompt on yet.

        Args:
            cache: Where its row lives.
            task: The task.
            alone: Whether nothing else can go on, so that a short wait costs nothing.
        """
        arriving = task.arriving
        if arriving is None:
            return False
        if not arriving.arrival.over:
            if not alone:
                return True
            if self._can_read_on(task, arriving):
                return False
            arriving.arrival.wait([len(data) for data in arriving.arrival.buffers], LAYER_SECONDS)
            if not arriving.arrival.over:
                return True
        return not self._settle(cache, task, arriving)

    def read(self, cache: ResidentCache, task: Task, tokens: int, before: Before) -> torch.Tensor | None:
        """Read a chunk of a task's prompt, for which there is room, and keep the boundary behind it if it is wanted.

        Args:
            cache: Where its row lives.
            task: The task.
            tokens: Tokens of the chunk.
            before: Called before each layer of the model.

        Returns:
            ``[vocabulary]`` float32 logits after the last of them; None if the row is not there yet.
        """
        row, arriving = task.seat, task.arriving
        ids = task.ids[row.step : row.step + tokens]
        began, others = time.monotonic(), 0.0

        def ready(layer: int) -> None:
            nonlocal others
            since = time.monotonic()
            before(layer)
            others += time.monotonic() - since
            if arriving:
                arriving.wait(row.pool.parts(layer)[-1])

        try:
            logits = self._step([row], [ids], ready)[0]
        except LateError:
            assert arriving is not None
            arriving.late = True
            return None
        except CorruptRowError:
            assert arriving is not None
            self._lose(cache, task, arriving, corrupt=True)
            return None
        if arriving:
            self._arrived(task, arriving)
        if task.prefix:
            task.prefix.passed(row, tokens, None if arriving else time.monotonic() - began - others)
        return logits

    def _can_read_on(self, task: Task, arriving: Arriving) -> bool:
        """Whether a task's next tokens can be read while its slots come.

        Not if some must be evicted or recalled first, for which all must be there; nor over sliding layers, where a
        pass that had to be given up could not be repeated.
        """
        row, pool = task.seat, task.seat.pool
        if arriving.late or task.recall or len(pool.global_layers) < len(pool.layers):
            return False
        return row.slack >= row.next_chunk(len(task.request.prompt) - row.step)

    def _settle(self, cache: ResidentCache, task: Task, arriving: Arriving) -> bool:
        """Put what has come in place; False, and the row is empty, if not all has."""
        if not arriving.arrival.whole:
            self._lose(cache, task, arriving, corrupt=False)
            return False
        try:
            arriving.incoming.put_all()
        except CorruptRowError:
            self._lose(cache, task, arriving, corrupt=True)
            return False
        self._arrived(task, arriving)
        return True

    def _arrived(self, task: Task, arriving: Arriving) -> None:
        task.arriving = None
        arriving.beginning.arrived()

    def _lose(self, cache: ResidentCache, task: Task, arriving: Arriving, *, corrupt: bool) -> None:
        """Give a task another row, which is empty."""
        if corrupt:
            LOGGER.error("what session %s would begin with does not fit; its prompt is read", task.session_id)
        task.arriving = None
        arriving.beginning.lost(corrupt=corrupt)
        row, task.row = task.seat, None
        cache.remove_row(row)
        task.row = cache.add_row(row.grant, row.name, row.limit)
