"""Reading prompts, a chunk at a time, without holding up whoever can go on meanwhile."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from scissorhands.cache import ResidentCache
from scissorhands.row import Row
from scissorhands_server.worker.accounting import count_attention, count_stall
from scissorhands_server.worker.answers import Answers
from scissorhands_server.worker.arrivals import Arrivals
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.planner import RemotePlanner
from scissorhands_server.worker.recalls import Recalls
from scissorhands_server.worker.task import Progress, Task


class Reader:
    """Reads the prompts of tasks. Only the engine's thread uses it.

    Args:
        arrivals: Lets rows begin with what comes from the store.
        planner: Whom the cache asks for plans; None if nobody.
        recalls: Brings evicted slots back.
        answers: Is told of evictions.
        metrics: The worker's metrics.
        plan_deadline: How long a chunk waits for a plan, in seconds.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        planner: RemotePlanner | None,
        recalls: Recalls,
        answers: Answers,
        metrics: WorkerMetrics,
        plan_deadline: float,
    ) -> None:
        self._arrivals = arrivals
        self._planner = planner
        self._recalls = recalls
        self._answers = answers
        self._metrics = metrics
        self._plan_deadline = plan_deadline

    def read(
        self, cache: ResidentCache, task: Task, running: Sequence[Task], pause: Callable[[float], None], *, alone: bool
    ) -> torch.Tensor | None:
        """Read the next chunk of a task's prompt.

        Args:
            cache: What its row lives in.
            task: The task.
            running: All tasks that have a row.
            pause: Called before each layer of the model with what it costs, in tokens: its share of the chunk.
            alone: Whether nobody else can go on while it waits.

        Returns:
            ``[vocabulary]`` logits after the last token that was read; None if slots, a plan or a recall are
            waited for.
        """
        if self._arrivals.holds(cache, task, alone=alone):
            return None
        row, remaining = task.seat, task.unread
        tokens = row.next_chunk(remaining)
        if not alone and self._awaits_plan(cache, row, tokens):
            task.held_since = task.held_since or time.monotonic()
            return None
        count_stall(task, self._metrics)
        self._answers.evicted(task, cache.prepare_prefill(row, tokens, self._plan_deadline))
        tokens = self._recalls.part_of(task, tokens, remaining)
        if tokens == remaining and self._recalls.holds(cache, task, tokens, running):
            return None
        share = tokens / row.pool.model_layers
        logits = self._arrivals.read(cache, task, tokens, lambda _: pause(share))
        if logits is None:
            return None
        self._metrics.prompt_tokens.inc(tokens)
        count_attention(cache, tokens, self._metrics)
        task.emit(Progress(row.step))
        if not (alone or task.prefilled):
            # The plan of the next chunk comes while others go on.
            self._awaits_plan(cache, row, row.next_chunk(task.unread))
        return logits

    def _awaits_plan(self, cache: ResidentCache, row: Row, tokens: int) -> bool:
        """Ask for the plan that a chunk needs, if it needs one, and tell whether it is on its way."""
        if self._planner is None or row.slack >= tokens:
            return False
        snapshot = partial(cache.snapshot, row, ahead=0, incoming=tokens)
        return self._planner.awaited(row, snapshot, self._plan_deadline)
