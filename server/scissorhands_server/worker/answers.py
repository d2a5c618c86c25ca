"""What comes of a forward pass for its task: its next token, and what it evicted."""

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from scissorhands.row import Eviction
from scissorhands_server.worker.accounting import count_eviction
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.offload import Offloader
from scissorhands_server.worker.shadows import Shadows
from scissorhands_server.worker.task import Finished, Task, Token


@dataclass(frozen=True)
class Ending:
    """How a task has ended, and the text that was still held back."""

    finished: Finished
    rest: str


class Answers:
    """Adds to the answers of tasks. Only the engine's thread uses it.

    Args:
        eos_ids: Token ids that end an answer.
        offloader: What becomes of evicted slots; None drops them.
        shadows: Full caches that answers are compared with.
        metrics: The worker's metrics.
    """

    def __init__(
        self, eos_ids: Collection[int], offloader: Offloader | None, shadows: Shadows, metrics: WorkerMetrics
    ) -> None:
        self._eos_ids = eos_ids
        self._offloader = offloader
        self._shadows = shadows
        self._metrics = metrics

    def evicted(self, task: Task, eviction: Eviction | None) -> None:
        """Count an eviction, if there was one, and hand the evicted slots on."""
        if eviction is None:
            return
        count_eviction(task, eviction, self._metrics)
        if task.shadowed and eviction.epoch == 0:
            self._shadows.begin(task)
        if self._offloader:
            self._offloader.offload(task, eviction)

    def accept(self, task: Task, logits: torch.Tensor) -> Ending | None:
        """Choose a task's next token from ``[vocabulary]`` logits, send it, and tell how it ends."""
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
            return Ending(Finished("eos", ""), task.text.finish())
        delta = task.text.push(token)
        task.emit(Token(token, delta.text))
        if delta.stop is not None:
            return Ending(Finished("stop", delta.stop), "")
        if task.generated >= task.request.max_new_tokens:
            return Ending(Finished("length", ""), task.text.finish())
        return None
