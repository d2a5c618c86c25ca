"""Which shadows there are, and when they may run.

A shadow makes the engine do the work of a full cache, so it must not be felt: its memory is set aside within a bound of
its own, and while requests run or wait, shadows take at most a share of the engine's time, a chunk at a time. Only the
last message of a request that is compared waits for its shadow, and not for longer than a deadline.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.errors import EngineError, ScissorhandsError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.step import ModelStep
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.quality import Comparison, ShadowResult
from scissorhands_server.worker.shadow import CHUNK, Shadow
from scissorhands_server.worker.task import Task

LOGGER = logging.getLogger(__name__)

_ID_DIGITS = 8
_IDS = 1 << 4 * _ID_DIGITS
_LOGIT_BYTES = 4


def sampled(session_id: str, share: float) -> bool:
    """Whether a session is among the ``share`` that is compared. Ids are random hexadecimal digits, so this is too."""
    return int(session_id[:_ID_DIGITS], 16) < share * _IDS


@dataclass(frozen=True)
class ShadowLimits:
    """What shadows may take.

    Args:
        bytes: Bytes of all of them.
        load: Share of the engine's time while requests run or wait.
        patience: How long a task that has finished waits for its shadow, in seconds.
    """

    bytes: int
    load: float
    patience: float


class Shadows:
    """The shadows of a worker. Only the engine's thread uses it.

    Args:
        step: Runs their forward passes.
        new_cache: Makes what a shadow's row lives in.
        vocabulary: Token ids of the model.
        metrics: The worker's metrics.
        limits: What they may take.
    """

    def __init__(
        self,
        step: ModelStep,
        new_cache: Callable[[], ResidentCache],
        vocabulary: int,
        metrics: WorkerMetrics,
        limits: ShadowLimits,
    ) -> None:
        self._step = step
        self._new_cache = new_cache
        self._logits_bytes = vocabulary * _LOGIT_BYTES
        self._metrics = metrics
        self._limits = limits
        # By session; tasks that finished first come first among those that have finished.
        self._shadows: dict[str, Shadow] = {}
        self._deadlines: dict[str, float] = {}
        # Time that shadows may take, in seconds; below zero they are in debt.
        self._credit = 0.0

    @property
    def waited_for(self) -> list[Task]:
        """Tasks that have finished and wait for their shadows, the longest waiting first."""
        return [self._shadows[session_id].task for session_id in self._deadlines]

    def begin(self, task: Task) -> None:
        """Give a task that is about to evict for the first time a shadow, if it fits; once, even if it begins anew."""
        if task.session_id in self._shadows or task.quality.shadow is not None:
            return
        total = len(task.request.prompt) + task.request.max_new_tokens
        cache = self._new_cache()
        granted = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), cache.shape, total)
        size = granted.bytes + task.request.max_new_tokens * self._logits_bytes
        if self._reserved() + size > self._limits.bytes:
            self._settle(task, ShadowResult.NO_MEMORY)
            return
        try:
            self._shadows[task.session_id] = Shadow(task, cache, granted, size)
        except RuntimeError:  # Torch's out-of-memory errors.
            self._settle(task, ShadowResult.NO_MEMORY)
        self._report()

    def hold(self, task: Task, logits: torch.Tensor) -> None:
        """Keep the logits ``[vocabulary]`` from which a task's next token is chosen, if it has a shadow."""
        shadow = self._shadows.get(task.session_id)
        if shadow is not None:
            shadow.hold(logits)

    def finish(self, task: Task) -> bool:
        """Take note that a task has all its tokens; True if its last message must wait for its shadow."""
        if task.session_id in self._shadows:
            self._deadlines[task.session_id] = time.monotonic() + self._limits.patience
            return True
        if task.shadowed and task.quality.shadow is None:  # It has evicted nothing: its own row was a full cache.
            self._measured(task, Comparison(task.generated, 0.0, task.generated))
        return False

    def work(self, spent: float, *, busy: bool) -> list[Task]:
        """Run at most one chunk of one shadow.

        Args:
            spent: Time that the engine has spent on its requests since it last called, in seconds.
            busy: Whether requests run or wait.

        Returns:
            Tasks that waited for their shadows and need not any more.
        """
        self._credit = min(0.0, self._credit + spent * self._limits.load)
        done = [self._shadows[late].task for late, end in self._deadlines.items() if end <= time.monotonic()]
        for task in done:
            self._settle(task, ShadowResult.LATE)
        shadow = self._next()
        if shadow is None or (busy and (self._credit < 0 or self._limits.load == 0)):
            return done
        began = time.monotonic()
        settled = self._read(shadow)
        took = time.monotonic() - began
        self._metrics.shadow_seconds.inc(took)
        self._credit -= took if busy else 0.0
        return [*done, shadow.task] if settled and shadow.task.finished else done

    def drop(self, task: Task) -> None:
        """Give up the shadow of a task that ends without its last message."""
        if task.shadowed and task.quality.shadow is None:
            self._settle(task, ShadowResult.CANCELLED)

    def drop_all(self) -> list[Task]:
        """Give up all shadows; return the tasks that waited for theirs."""
        waiting = self.waited_for
        for shadow in list(self._shadows.values()):
            self._settle(shadow.task, ShadowResult.LATE)
        return waiting

    def _next(self) -> Shadow | None:
        """Return the shadow that somebody waits for, else one that can read a whole chunk."""
        for session_id in self._deadlines:
            return self._shadows[session_id]
        return next((shadow for shadow in self._shadows.values() if shadow.unread >= CHUNK), None)

    def _read(self, shadow: Shadow) -> bool:
        """Read a chunk; True if that was the last, or could not be read."""
        try:
            shadow.read(self._step)
            if not math.isfinite(shadow.comparison.nats):
                raise EngineError("the divergence is not a finite number")
        except (RuntimeError, ScissorhandsError):  # The comparison is lost, the answer is not.
            LOGGER.exception("the comparison of session %s with a full cache failed", shadow.task.session_id)
            self._settle(shadow.task, ShadowResult.FAILED)
            return True
        if shadow.task.finished is None or shadow.unread:
            return False
        self._measured(shadow.task, shadow.comparison)
        return True

    def _measured(self, task: Task, comparison: Comparison) -> None:
        task.quality.comparison = comparison
        self._metrics.shadow_tokens.inc(comparison.tokens)
        self._metrics.shadow_same.inc(comparison.same)
        self._metrics.shadow_divergence.inc(comparison.nats)
        self._settle(task, ShadowResult.MEASURED)

    def _settle(self, task: Task, result: ShadowResult) -> None:
        """Take note of what became of a task's shadow, and free it."""
        task.quality.shadow = result
        self._metrics.shadows.labels(result.value).inc()
        self._shadows.pop(task.session_id, None)
        self._deadlines.pop(task.session_id, None)
        self._report()

    def _reserved(self) -> int:
        return sum(shadow.size_bytes for shadow in self._shadows.values())

    def _report(self) -> None:
        self._metrics.shadow_reserved.set(self._reserved())
