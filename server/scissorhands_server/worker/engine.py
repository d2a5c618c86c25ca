"""The engine: one thread that steps all running rows together.

Each turn frees the rows of streams that went away, gives free rows to waiting requests, reads one chunk of one prompt,
decodes one token of every row whose prompt has been read, and lets a shadow read if there is time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from scissorhands.cache import ResidentCache
from scissorhands.errors import CapacityError, EngineError, ScissorhandsError, StoppingError
from scissorhands.row import Eviction, Row
from scissorhands.step import ModelStep
from scissorhands_server.worker.accounting import count_eviction, count_stall, show_cache
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.offload import Offloader
from scissorhands_server.worker.planner import RemotePlanner
from scissorhands_server.worker.recalls import Recalls
from scissorhands_server.worker.shadows import Shadows
from scissorhands_server.worker.task import Failed, Finished, Progress, Rest, Task, Token

LOGGER = logging.getLogger(__name__)

# A bound on every wait of the engine's thread, so that it notices when it should stop.
IDLE_SECONDS = 0.5
# When a request that found the queue full should try again.
RETRY_SECONDS = 1.0

# Called from the engine's thread when a task has ended; True if its evicted slots should be kept.
Ended = Callable[[Task, bool], None]


class _BrokenCacheError(Exception):
    """A row could not be freed: what the cache holds of the others is not certain any more."""


class Engine:
    """Runs tasks on a model. All methods but the loop are called from other threads.

    Args:
        loaded: The model.
        new_cache: Makes what rows live in.
        planner: Whom the cache asks for plans; None if nobody.
        offloader: What becomes of evicted slots; None drops them.
        recalls: Brings evicted slots back.
        shadows: Full caches that answers are compared with.
        metrics: The worker's metrics.
        rows: Tasks that run at once.
        queue: Tasks that may wait.
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
        metrics: WorkerMetrics,
        *,
        rows: int,
        queue: int,
        plan_deadline: float,
        ended: Ended,
    ) -> None:
        self._step = ModelStep(loaded.model)
        self._eos_ids = loaded.eos_ids
        self._new_cache = new_cache
        self._cache = new_cache()
        self._planner = planner
        self._offloader = offloader
        self._recalls = recalls
        self._shadows = shadows
        self._metrics = metrics
        self._max_rows = rows
        self._max_queued = queue
        self._plan_deadline = plan_deadline
        self._ended = ended
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
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
    def _governed_heads(self) -> int:
        """Heads of the layers that budgets govern; each gives every query's attention, 1 in all, to its slots."""
        return len(self._cache.shape.global_layers) * self._cache.shape.kv_heads

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def check_capacity(self) -> None:
        """Make sure that there is a place in the queue.

        Raises:
            CapacityError: The queue is full.
            StoppingError: The worker is stopping.
        """
        with self._work:
            if self._stopping:
                raise StoppingError
            if len(self._running) + len(self._waiting) >= self._max_rows + self._max_queued:
                raise CapacityError(
                    f"all {self._max_rows} rows and {self._max_queued} places in the queue are taken", RETRY_SECONDS
                )

    def submit(self, task: Task) -> int:
        """Queue a task and return how many are ahead of it; raises as :meth:`check_capacity` does."""
        with self._work:
            try:
                self.check_capacity()
            except ScissorhandsError:
                self.refuse(task)
                raise
            ahead = len(self._running) + len(self._waiting) - self._max_rows
            self._waiting.append(task)
            self._metrics.queued.set(len(self._waiting))
            self._work.notify()
        return max(0, ahead)

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
                if not (self._waiting or self._running or self._stopping or self._shadows.waited_for):
                    self._work.wait(IDLE_SECONDS)
                if self._stopping:
                    break
            try:
                self._turn()
            except Exception:  # The engine's boundary: what fails outside a task's own work must not end the thread.
                LOGGER.exception("the engine's turn failed; its tasks are ended")
                self._fail_all(EngineError("the engine failed; see the worker's log"))
        for task in self._running:
            task.keep()
        self._fail_all(StoppingError())

    def _turn(self) -> None:
        began = time.monotonic()
        self._sweep()
        self._admit()
        self._prefill_chunk()
        self._decode()
        busy = bool(self._running or self._waiting)
        for task in self._shadows.work(time.monotonic() - began, busy=busy):
            self._deliver(task)
        self._report()

    def _sweep(self) -> None:
        """Drop tasks whose streams went away."""
        with self._work:
            gone = [task for task in self._waiting if task.cancelled]
            for task in gone:
                self._waiting.remove(task)
        gone += [task for task in [*self._running, *self._shadows.waited_for] if task.cancelled]
        for task in gone:
            self._free(task, keep_evicted=False)
            self._metrics.ended("cancelled")

    def _admit(self) -> None:
        """Give free rows to the tasks that wait longest."""
        while len(self._running) < self._max_rows:
            with self._work:
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                self._running.append(task)
            with self._guard([task]):
                # The last token is chosen, but never appended.
                limit = len(task.request.prompt) + task.request.max_new_tokens - 1
                task.row = self._cache.add_row(task.grant, task.session_id, limit)
                task.started = time.monotonic()
                self._metrics.queue_time.observe(task.started - task.arrived)
                task.restore()
                if task.shadowed and task.row.epoch:  # It has evicted in an earlier turn: it is no full cache now.
                    self._shadows.begin(task)

    def _prefill_chunk(self) -> None:
        """Read a chunk of the prompt that waits longest and is not held, unless rows can decode till its plan comes."""
        task = min((task for task in self._running if not task.prefilled), key=lambda task: task.held, default=None)
        if task is None:
            return
        with self._guard([task]):
            row = task.seat
            remaining = len(task.request.prompt) - row.step
            tokens = row.next_chunk(remaining)
            if self._awaits_plan(row, tokens):
                task.held_since = task.held_since or time.monotonic()
                return
            count_stall(task, self._metrics)
            self._evicted(task, self._cache.prepare_prefill(row, tokens, self._plan_deadline))
            tokens = self._recalls.part_of(task, tokens, remaining)
            if tokens == remaining and self._recalls.holds(self._cache, task, tokens, self._running):
                return
            began = time.monotonic()
            logits = self._step([row], [task.ids[row.step : row.step + tokens]])
            if task.prefix:
                task.prefix.passed(row, tokens, time.monotonic() - began)
            self._metrics.prompt_tokens.inc(tokens)
            self._metrics.mass.inc(tokens * self._governed_heads)
            task.emit(Progress(row.step))
            if tokens == remaining:
                self._accept(task, logits[0])
            else:
                # The plan of the next chunk comes while others decode.
                self._awaits_plan(row, row.next_chunk(remaining - tokens))

    def _awaits_plan(self, row: Row, tokens: int) -> bool:
        """Whether the plan that a chunk needs is on its way while other rows can decode, which must not wait for it."""
        if self._planner is None or row.slack >= tokens or not self._decoding():
            return False
        snapshot = partial(self._cache.snapshot, row, ahead=0, incoming=tokens)
        return self._planner.awaited(row, snapshot, self._plan_deadline)

    def _decode(self) -> None:
        """Decode one token of every row whose prompt has been read."""
        began, held = time.monotonic(), []
        for task in self._decoding():
            with self._guard([task]):
                self._evicted(task, self._cache.prepare_decode(task.seat))
                if task.recalls_next and self._recalls.holds(self._cache, task, 1, self._running):
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
                    self._decoded(task, self._step([row], [token])[0])
            return
        for task, scores in zip(batch, logits, strict=True):
            with self._guard([task]):
                self._decoded(task, scores)
        self._metrics.step.observe(time.monotonic() - began)

    def _decoding(self) -> list[Task]:
        """Return the tasks that decode, those of one pool next to each other."""
        ready = [task for task in self._running if task.prefilled]
        return sorted(ready, key=lambda task: (id(task.seat.pool), task.seat.index))

    def _decoded(self, task: Task, logits: torch.Tensor) -> None:
        self._metrics.mass.inc(self._governed_heads)
        self._accept(task, logits)

    def _accept(self, task: Task, logits: torch.Tensor) -> None:
        """Choose a task's next token and end the task if it was the last."""
        self._shadows.hold(task, logits)
        token = task.sampler.next(logits, task.ids)
        task.ids.append(token)
        now = time.monotonic()
        if task.generated == 1:
            task.first_token = now
            self._metrics.time_to_first_token.observe(now - task.arrived)
        else:
            self._metrics.inter_token_latency.observe(now - task.last_token)
        task.last_token = now
        self._metrics.generated_tokens.inc()
        if token in self._eos_ids and not task.request.ignore_eos:
            task.emit(Token(token, ""))
            self._finish(task, Finished("eos", ""), task.text.finish())
            return
        delta = task.text.push(token)
        task.emit(Token(token, delta.text))
        if delta.stop is not None:
            self._finish(task, Finished("stop", delta.stop), "")
        elif task.generated >= task.request.max_new_tokens:
            self._finish(task, Finished("length", ""), task.text.finish())

    def _evicted(self, task: Task, eviction: Eviction | None) -> None:
        """Count an eviction and hand the evicted slots on."""
        if eviction is None:
            return
        count_eviction(task, eviction, self._metrics)
        if task.shadowed and eviction.epoch == 0:
            self._shadows.begin(task)
        if self._offloader:
            self._offloader.offload(task, eviction)

    def _finish(self, task: Task, finished: Finished, rest: str) -> None:
        """Free the row of a task that has all its tokens, and send its last message unless that waits for a shadow."""
        task.keep()
        self._vacate(task)
        task.finished = finished
        if rest:
            task.emit(Rest(rest))
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
        except _BrokenCacheError:
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
            tasks = [*self._waiting, *self._running]
            self._waiting.clear()
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
        """Free a task's row."""
        if task.row is not None:
            try:
                self._cache.remove_row(task.row)
            except Exception as error:  # A boundary: rows may have moved in some layers and not in others.
                raise _BrokenCacheError from error
            task.row = None
        if task.recall:
            task.recall.drop()
        if self._planner:
            self._planner.forget(task.session_id)
        with self._work:
            if task in self._running:
                self._running.remove(task)
        self._report()

    def _report(self) -> None:
        """Set the gauges to what is true now."""
        self._metrics.queued.set(len(self._waiting))
        self._metrics.rows.set(len(self._running))
        show_cache(self._cache, self._metrics)
