"""The engine: one thread that steps all running rows together.

Each turn frees the rows of streams that went away, gives rows to waiting requests, reads a chunk of a prompt or, once
the step's allowance for that is spent, decodes one token of every row whose prompt has been read, and lets a shadow
read if there is time. The scheduler decides who gets a row, who makes room for it, and whose prompt is read.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from scissorhands.cache import ResidentCache
from scissorhands.errors import EngineError, ScissorhandsError, StoppingError
from scissorhands.step import ModelStep
from scissorhands_server.worker.accounting import count_attention, show_cache
from scissorhands_server.worker.allowance import Allowance
from scissorhands_server.worker.answers import Answers, Ending
from scissorhands_server.worker.arrivals import Arrivals
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.offload import Offloader
from scissorhands_server.worker.parking import Parking
from scissorhands_server.worker.planner import RemotePlanner
from scissorhands_server.worker.reading import Reader
from scissorhands_server.worker.recalls import Recalls
from scissorhands_server.worker.scheduler import Limits, Priority, Scheduler
from scissorhands_server.worker.shadows import Shadows
from scissorhands_server.worker.task import Failed, Rest, Task

LOGGER = logging.getLogger(__name__)

# A bound on every wait of the engine's thread, so that it notices when it should stop.
IDLE_SECONDS = 0.5

# Called from the engine's thread when a task has ended; True if its evicted slots should be kept.
Ended = Callable[[Task, bool], None]


class _BrokenTurnError(Exception):
    """What failed is not one task's own, such as freeing a row: what the cache holds of others is not certain then."""


class Engine:
    """Runs tasks on a model. All methods but the loop are called from other threads.

    Args:
        loaded: The model.
        new_cache: Makes what rows live in.
        planner: Whom the cache asks for plans; None if nobody.
        offloader: What becomes of evicted slots; None drops them.
        recalls: Brings evicted slots back.
        shadows: Full caches that answers are compared with.
        parking: Puts rows away for more urgent tasks.
        metrics: The worker's metrics.
        limits: What there is room for.
        step_tokens: Tokens that are decoded and read in one step, as far as chunks allow.
        plan_deadline: How long prefill waits for a plan, in seconds.
        ended: Told of every task that ended.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        new_cache: Callable[[], ResidentCache],
        planner: RemotePlanner | None,
        offloader: Offloader | None,
        recalls: Recalls,
        shadows: Shadows,
        parking: Parking,
        metrics: WorkerMetrics,
        *,
        limits: Limits,
        step_tokens: int,
        plan_deadline: float,
        ended: Ended,
    ) -> None:
        self._step = ModelStep(loaded.model)
        self._arrivals = Arrivals(self._step)
        self._new_cache = new_cache
        self._cache = new_cache()
        self._planner = planner
        self._recalls = recalls
        self._shadows = shadows
        self._answers = Answers(loaded.eos_ids, offloader, shadows, metrics)
        self._parking = parking
        self._metrics = metrics
        self._reader = Reader(self._arrivals, planner, recalls, self._answers, metrics, plan_deadline)
        self._ended = ended
        # Only the engine's thread changes who runs; whatever else is read or changed needs the lock of ``_work``.
        self._scheduler: Scheduler[Task] = Scheduler(limits)
        self._allowance = Allowance(step_tokens)
        self._work = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Fail what still runs, and end the thread within ``timeout`` seconds."""
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join(timeout)

    @property
    def cache(self) -> ResidentCache:
        """Where rows live; another one after a failure that was not of one request alone."""
        return self._cache

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def more_rows(self) -> int:
        """How many more rows, of the size last asked for, could be held."""
        with self._work:
            return self._scheduler.more_rows

    def check_capacity(self, priority: Priority, row_bytes: int = 0) -> None:
        """Make sure that there is a place for a task.

        Args:
            priority: Its priority.
            row_bytes: Bytes of its row; 0 if they are not known yet.

        Raises:
            InvalidRequestError: There never will be.
            CapacityError: The queue is full.
            StoppingError: The worker is stopping.
        """
        with self._work:
            if self._stopping:
                raise StoppingError
            self._scheduler.check(priority, row_bytes)

    def submit(self, task: Task) -> int:
        """Queue a task and return how many are ahead of it; raises as :meth:`check_capacity` does."""
        with self._work:
            try:
                if self._stopping:
                    raise StoppingError
                ahead = self._scheduler.add(task)
            except ScissorhandsError:
                self.refuse(task)
                raise
            self._metrics.queued.set(len(self._scheduler.waiting))
            self._work.notify()
        return ahead

    def refuse(self, task: Task) -> None:
        """End a task that is never queued."""
        self._ended(task, False)

    def cancel(self, task: Task) -> None:
        """Free a task's row within a step; a task that has ended stays as it is."""
        with self._work:
            task.cancelled = True
            self._work.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._work:
                if not (self._scheduler.busy or self._stopping or self._shadows.waited_for):
                    self._work.wait(IDLE_SECONDS)
                if self._stopping:
                    break
            try:
                self._turn()
            except Exception:  # The engine's boundary: what fails outside a task's own work must not end the thread.
                LOGGER.exception("the engine's turn failed; its tasks are ended")
                self._fail_all(EngineError("the engine failed; see the worker's log"))
        for task in self._scheduler.running:
            task.keep()
        for task in self._scheduler.waiting:
            self._parking.keep(task)
        self._fail_all(StoppingError())

    def _turn(self) -> None:
        began = time.monotonic()
        self._sweep()
        self._admit()
        if self._allowance.spent or not self._read():
            self._decode()
        for task in self._shadows.work(time.monotonic() - began, busy=self._scheduler.busy):
            self._deliver(task)
        self._report()

    def _sweep(self, besides: Task | None = None) -> None:
        """Drop tasks whose streams went away, ``besides`` one that is in the midst of a forward pass."""
        with self._work:
            waiting = [task for task in self._scheduler.waiting if task.cancelled]
        held = [task for task in [*self._scheduler.running, *self._shadows.waited_for] if task is not besides]
        for task in [*waiting, *(task for task in held if task.cancelled)]:
            self._free(task, keep_evicted=False)
            self._metrics.ended("cancelled")

    def _admit(self) -> None:
        """Give rows to the tasks whose turn it is, if need be those of less urgent ones."""
        while True:
            with self._work:
                admission = self._scheduler.next()
            if admission is None:
                return
            if all(self._put_away(victim, admission.lacks) for victim in admission.victims):
                self._seat(admission.job)

    def _put_away(self, task: Task, lacks: str) -> bool:
        """Put a task's row away; False if it must stay for now."""
        if not self._parking.put(task, lacks):
            self._scheduler.leave(task)
            return False
        with self._work:
            self._scheduler.put_away(task)
        self._give_back(task)
        return True

    def _seat(self, task: Task) -> None:
        """Give a task a row, in which it begins or goes on."""
        with self._work:
            self._scheduler.admit(task)
        with self._guard([task]):
            # The last token is chosen, but never appended.
            limit = len(task.request.prompt) + task.request.max_new_tokens - 1
            task.row = self._cache.add_row(task.grant, task.session_id, limit)
            if task.parked:
                self._parking.bring_back(task)
                return
            task.started = time.monotonic()
            self._metrics.queue_time.observe(task.started - task.arrived)
            self._arrivals.begin(task)
            if task.shadowed and task.row.epoch:  # It has evicted in an earlier turn: it is no full cache now.
                self._shadows.begin(task)

    def _read(self) -> bool:
        """Read a chunk of the prompt whose turn it is, passing over those that wait; False if there is none to read."""
        ready = self._scheduler.reading()
        for task in ready:
            alone = task is ready[-1] and not self._decoding()
            with self._guard([task]):
                pause = partial(self._pause, task)
                logits = self._reader.read(self._cache, task, self._scheduler.running, pause, alone=alone)
                if logits is None:
                    continue
                self._scheduler.has_read(task)
                if task.prefilled:
                    self._accept(task, logits)
            return True
        return False

    def _pause(self, reading: Task, tokens: float) -> None:
        """Spend some of the step's allowance on a prompt; if none is left, the rows that decode have their step first.

        Args:
            reading: Whose prompt it is. It is in the midst of a forward pass.
            tokens: What is read next, in tokens.
        """
        if self._allowance.spent and self._decoding():
            try:
                self._sweep(besides=reading)
                self._decode()
            except Exception as error:  # A boundary: whatever it is, it is not the prompt's fault.
                raise _BrokenTurnError from error
        self._allowance.spend(tokens)

    def _decode(self) -> None:
        """Decode one token of every row whose prompt has been read, and let prompts be read again."""
        began, held = time.monotonic(), []
        self._allowance.begin(len(self._decoding()))
        for task in self._decoding():
            with self._guard([task]):
                self._answers.evicted(task, self._cache.prepare_decode(task.seat))
                if task.recalls_next and self._recalls.holds(self._cache, task, 1, self._scheduler.running):
                    held.append(task)
        batch = [task for task in self._decoding() if task not in held]
        if not batch:
            return
        rows = [task.seat for task in batch]
        last = [[task.ids[-1]] for task in batch]
        try:
            logits = list(self._step(rows, last))
        except Exception:  # A boundary: find out which task it was, so that the others go on.
            LOGGER.exception("a step of %d rows failed; each is stepped alone", len(batch))
            for task, row, token in zip(batch, rows, last, strict=True):
                with self._guard([task]):
                    scores = self._step([row], [token])[0]
                    count_attention(self._cache, 1, self._metrics)
                    self._accept(task, scores)
            return
        count_attention(self._cache, len(rows), self._metrics)
        with batch[0].outbox.burst():  # All have the same.
            for task, scores in zip(batch, logits, strict=True):
                with self._guard([task]):
                    self._accept(task, scores)
        self._metrics.step.observe(time.monotonic() - began)

    def _decoding(self) -> list[Task]:
        """Return the tasks that decode, those of one pool next to each other."""
        ready = [task for task in self._scheduler.running if task.prefilled]
        return sorted(ready, key=lambda task: (id(task.seat.pool), task.seat.index))

    def _accept(self, task: Task, logits: torch.Tensor) -> None:
        """Add a token to a task's answer, and end the task if it was the last."""
        ending = self._answers.accept(task, logits)
        if ending is not None:
            self._finish(task, ending)

    def _finish(self, task: Task, ending: Ending) -> None:
        """Free the row of a task that has all its tokens, and send its last message unless that waits for a shadow."""
        task.keep()
        self._vacate(task)
        task.finished = ending.finished
        if ending.rest:
            task.emit(Rest(ending.rest))
        if not self._shadows.finish(task):
            self._deliver(task)

    def _deliver(self, task: Task) -> None:
        """Send the last message of a task."""
        assert task.finished is not None
        self._ended(task, True)
        self._metrics.ended(task.finished.reason)
        task.emit(task.finished)

    @contextmanager
    def _guard(self, tasks: Sequence[Task]) -> Iterator[None]:
        """End tasks with an error if their own work fails; the engine and all others go on."""
        try:
            yield
        except _BrokenTurnError:
            raise
        except ScissorhandsError as error:
            self._fail(tasks, error)
        except Exception as error:  # The boundary of one request: it ends with an error, and no other.
            LOGGER.exception("request failed inside the engine")
            self._fail(tasks, EngineError(f"the engine failed on this request: {type(error).__name__}"))

    def _fail(self, tasks: Sequence[Task], error: ScissorhandsError) -> None:
        for task in tasks:
            self._free(task, keep_evicted=False)
            self._metrics.ended("error")
            task.emit(Failed(error))

    def _fail_all(self, error: ScissorhandsError) -> None:
        """End all tasks and start over with an empty cache: freeing rows one by one may be what failed."""
        with self._work:
            tasks = [*self._scheduler.waiting, *self._scheduler.running]
        for task in self._shadows.drop_all():
            self._deliver(task)
        self._cache = self._new_cache()
        for task in tasks:
            task.row = None
        self._fail(tasks, error)
        self._report()

    def _free(self, task: Task, *, keep_evicted: bool) -> None:
        """Free all that a task holds, and tell that it has ended."""
        self._vacate(task)
        self._shadows.drop(task)
        self._ended(task, keep_evicted)

    def _vacate(self, task: Task) -> None:
        """Free a task's row, wherever it is, and forget the task."""
        self._give_back(task)
        self._parking.drop(task)
        with self._work:
            self._scheduler.remove(task)
        self._report()

    def _give_back(self, task: Task) -> None:
        """Free a task's row, and give up what was asked for in its name."""
        if task.row is not None:
            try:
                self._cache.remove_row(task.row)
            except Exception as error:  # A boundary: rows may have moved in some layers and not in others.
                raise _BrokenTurnError from error
            task.row = None
        if task.recall:
            task.recall.drop()
        if self._planner:
            self._planner.forget(task.session_id)

    def _report(self) -> None:
        """Set the gauges to what is true now."""
        with self._work:
            self._metrics.queued.set(len(self._scheduler.waiting))
            self._metrics.more_rows.set(self._scheduler.more_rows)
        self._metrics.rows.set(len(self._scheduler.running))
        show_cache(self._cache, self._metrics)
