"""A shadow: a full cache that reads what a task reads and says what the model would have said without eviction."""

from collections import deque

import torch

from scissorhands.budget import Grant
from scissorhands.cache import ResidentCache
from scissorhands.divergence import divergence
from scissorhands.step import ModelStep
from scissorhands_server.worker.quality import Comparison
from scissorhands_server.worker.task import Task

# Tokens that a shadow reads at once: the longest that it keeps others waiting is the time of this.
CHUNK = 32


class Shadow:
    """The full cache of one task that has begun to evict. Until then the task's own row is a full cache.

    It lives in a cache of its own, so that freeing it touches no other row.

    Args:
        task: The task; its next token to choose is the first that a full cache might choose differently.
        cache: An empty cache; it gets one row.
        granted: Slots for all tokens.
        size_bytes: Bytes set aside for the row and for the logits that wait to be compared.
    """

    def __init__(self, task: Task, cache: ResidentCache, granted: Grant, size_bytes: int) -> None:
        self.task = task
        self.size_bytes = size_bytes
        self._row = cache.add_row(granted)
        # Logits of the task that the shadow has not come to yet.
        self._held: deque[torch.Tensor] = deque()
        # Tokens chosen before the first eviction are equal, because their distributions were a full cache's.
        self._tokens = self._same = task.generated
        self._nats = 0.0
        # Index of the token after which the first distribution is compared.
        self._first = len(task.ids) - 1

    @property
    def unread(self) -> int:
        """Tokens that can be read now. The last one chosen is never read: nothing was chosen after it."""
        return len(self.task.ids) - 1 - self._row.step

    @property
    def comparison(self) -> Comparison:
        """What has been compared so far."""
        return Comparison(self._tokens, self._nats, self._same)

    def hold(self, logits: torch.Tensor) -> None:
        """Keep the logits ``[vocabulary]`` of the token that is chosen next; a copy, for they are part of a batch's."""
        self._held.append(logits.clone())

    def read(self, step: ModelStep) -> None:
        """Read one chunk, and compare what follows each of its tokens with what the task said there."""
        start = self._row.step
        end = start + min(CHUNK, self.unread)
        compared = max(0, end - max(start, self._first))
        logits = step.scores([self._row], [self.task.ids[start:end]], max(1, compared))[0]
        if compared:
            said = torch.stack([self._held.popleft() for _ in range(compared)])
            nats, same = divergence(said, logits)
            self._tokens += compared
            self._nats += float(nats.sum())
            self._same += int(same.sum())
