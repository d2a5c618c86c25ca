"""Recall in the engine: when a row asks for evicted slots, how it waits for them, and how they come into their places.

A row asks before the last tokens of its prompt are read, by the queries of these, and again before every so many tokens
of the answer. While what it asked for is on its way it is held, and other rows go on. Whatever fails is a miss with its
reason: the row goes on as if it had not asked.
"""

import concurrent.futures
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from scissorhands.archive import decode_slots, packed_slots
from scissorhands.cache import ResidentCache
from scissorhands.codec import get_codec
from scissorhands.errors import CorruptSegmentError, InvalidRequestError
from scissorhands.recall import ROUNDS, last_tokens
from scissorhands.segment import SegmentHeader
from scissorhands.slots import LooseSlots
from scissorhands.step import ModelStep
from scissorhands.suspended import token_digest
from scissorhands.swap import sketch_of, swap
from scissorhands_server.worker.offload import Offloader
from scissorhands_server.worker.recall_metrics import RecallMetrics
from scissorhands_server.worker.recall_source import Came, CameSection, RecallSource
from scissorhands_server.worker.recalling import Asked, Recalling
from scissorhands_server.worker.task import Task

LOGGER = logging.getLogger(__name__)

# How long the engine waits at a time when there is nothing else to do.
_LOOK_SECONDS = 0.01
# The source keeps to its own deadline; this long beyond it, the engine does not believe in it any more.
_PATIENCE_SECONDS = 1.0


class Recalls:
    """Brings evicted slots back into rows. Called from the engine's thread.

    Args:
        step: Runs forward passes.
        source: Where evicted slots come from; None if they are not kept.
        offloader: Where swapped slots go; None drops them.
        metrics: Where what becomes of recalls is counted.
        deadline: The most that a recall may take, in seconds.
    """

    def __init__(
        self,
        step: ModelStep,
        source: RecallSource | None,
        offloader: Offloader | None,
        metrics: RecallMetrics,
        deadline: float,
    ) -> None:
        self._step = step
        self._source = source
        self._offloader = offloader
        self._metrics = metrics
        self._patience = deadline + _PATIENCE_SECONDS

    def part_of(self, task: Task, tokens: int, remaining: int) -> int:
        """Return how many of a chunk's ``tokens`` to read now: the last of a prompt are read apart, after a recall.

        Room is made for the whole chunk all the same, so what is evicted does not depend on it.

        Args:
            task: The task.
            tokens: Tokens of its next chunk.
            remaining: Tokens of its prompt that have not been read.
        """
        if task.recall is None or tokens < remaining:
            return tokens
        pool = task.seat.pool
        last = last_tokens(len(pool.layers), len(pool.global_layers))
        return tokens - last if tokens > last else tokens

    def holds(self, cache: ResidentCache, task: Task, tokens: int, running: Sequence[Task]) -> bool:
        """Let a row recall before its next tokens are read, and tell whether it must wait.

        Args:
            cache: The row's cache.
            task: Its task.
            tokens: How many are next; there is room for them.
            running: All tasks that have a row. If none can go on, a short wait costs nothing.
        """
        recall, row = task.recall, task.seat
        if recall is None or recall.settled == row.step:
            return False
        asked = recall.asked or self._ask(task, recall, task.ids[row.step : row.step + tokens])
        if asked is None:
            recall.settle(row.step)
            return False
        recall.asked = asked
        if all(other.held for other in running):
            concurrent.futures.wait([asked.coming], _LOOK_SECONDS)
        late = time.monotonic() > asked.since + self._patience
        if not asked.coming.done() and not late:
            return True
        came = Came() if late or asked.coming.cancelled() else asked.coming.result()
        if not came.whole and not came.misses:
            came.misses["late"] += 1
        slots = self._put(cache, task, asked, came)
        recall.drop()
        self._count(recall, came, slots, asked)
        recall.rounds += 1
        if came.whole and recall.rounds < (1 if task.generated else ROUNDS):
            return self.holds(cache, task, tokens, running)
        recall.settle(row.step)
        return False

    def _ask(self, task: Task, recall: Recalling, tokens: Sequence[int]) -> Asked | None:
        """Send what a row asks for; None if there is nothing to ask for, or nobody."""
        row = task.seat
        if not row.epoch:
            return None
        sketch = sketch_of(row, self._step.peek(row, tokens), recall.share)
        if not any(head.allowance for head in sketch):
            return None
        if self._source is None:
            recall.misses["manager_unavailable"] += 1
            self._metrics.misses.labels("manager_unavailable").inc()
            self._metrics.recalls.labels("missed").inc()
            return None
        return Asked(sketch, self._source.ask(task.session_id, row.epoch, sketch))

    def _put(self, cache: ResidentCache, task: Task, asked: Asked, came: Came) -> int:
        """Swap in what has come, and return how many slots; adds what may not be used to the misses."""
        parts: dict[int, list[LooseSlots]] = {}
        refused: dict[int, str] = {}
        for section in came.sections if came.whole else ():
            epoch = section.header.epoch
            if epoch not in refused:
                refused[epoch] = self._refusal(task, section.header)
                came.misses[refused[epoch]] += 1
            if not refused[epoch]:
                try:
                    parts.setdefault(section.place, []).append(self._slots(cache, task, section))
                except (CorruptSegmentError, InvalidRequestError) as error:
                    LOGGER.warning("a section of session %s cannot be recalled: %s", task.session_id, error)
                    came.misses["corrupt"] += 1
        del came.misses[""]
        if not parts:
            return 0
        loose = {place: LooseSlots.join(own) for place, own in parts.items()}
        swapped = swap(cache, task.seat, asked.sketch, loose)
        if self._offloader:
            self._offloader.offload(task, swapped)
        return swapped.slots

    def _refusal(self, task: Task, header: SegmentHeader) -> str:
        """Return why a segment may not be used; empty if it may."""
        recall = task.recall
        if recall and header.epoch in recall.unsent:
            return "dropped"  # What is stored under its epoch is of an earlier row of the session.
        if self._offloader is None or header.step > len(task.ids):
            return "mismatch"
        own = self._offloader.identity(task, token_digest(task.ids[: header.step]))
        # The budget may have changed from turn to turn, and what evicted exact slots are encoded in too; keys and
        # values have not.
        found = header.identity
        if found.policy.split(" ", 1)[0] != own.policy.split(" ", 1)[0]:
            return "mismatch"
        found = replace(found, policy=own.policy, layer_slots=own.layer_slots)
        if not task.grant.codecs:
            try:
                version = get_codec(found.codec, header.head_dim).version
            except InvalidRequestError:
                return "mismatch"
            own = replace(own, codec=found.codec, codec_version=version)
        return "" if found == own else "mismatch"

    def _slots(self, cache: ResidentCache, task: Task, section: CameSection) -> LooseSlots:
        header, place = section.header, section.place
        count = header.sections[place].slots
        if not task.grant.codecs:
            codec = get_codec(header.identity.codec, header.head_dim)
            return decode_slots(section.data, count, section.slots, codec, header.head_dim, cache.dtype)
        pool = task.seat.pool.layers[place // task.seat.pool.kv_heads]
        return packed_slots(section.data, count, section.slots, (pool.keys.shape[-1], pool.values.shape[-1]))

    def _count(self, recall: Recalling, came: Came, slots: int, asked: Asked) -> None:
        recall.slots += slots
        recall.misses += came.misses
        metrics = self._metrics
        if slots:
            recall.sections += len(came.sections)
            metrics.slots.inc(slots)
            metrics.sections.inc(len(came.sections))
            metrics.bytes.inc(sum(len(section.data) for section in came.sections))
        for reason, count in came.misses.items():
            metrics.misses.labels(reason).inc(count)
        metrics.recalls.labels("recalled" if slots else "missed" if came.misses else "nothing").inc()
        metrics.time.observe(time.monotonic() - asked.since)
