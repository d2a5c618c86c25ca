"""What a task recalls, and what has become of it."""

import concurrent.futures
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from scissorhands.recall import HeadSketch
from scissorhands_server.worker.recall_source import Came


@dataclass(frozen=True)
class Asked:
    """A recall on its way.

    Args:
        sketch: What the row asks for.
        coming: What comes of it.
        since: When it asked.
    """

    sketch: Sequence[HeadSketch]
    coming: "concurrent.futures.Future[Came]"
    since: float = field(default_factory=time.monotonic)


@dataclass
class Recalling:
    """One task's recalls. The engine's thread owns it.

    Args:
        share: Share of each head's budget that may be recalled at once.
        every: Tokens of the answer from one recall to the next; 0 recalls at the prompt's end only.
        slots: Slots recalled.
        sections: Sections that they were chosen from.
        misses: What could not be recalled, by reason.
        unsent: Epochs whose segments never reached the queue to the store.
        settled: Tokens that the row had seen when it was last done with recalling.
        rounds: Recalls since then.
        asked: The recall on its way.
    """

    share: float
    every: int
    slots: int = 0
    sections: int = 0
    misses: "Counter[str]" = field(default_factory=Counter)
    unsent: set[int] = field(default_factory=set)
    settled: int = -1
    rounds: int = 0
    asked: Asked | None = None

    @property
    def waits(self) -> bool:
        """Whether one is on its way."""
        return self.asked is not None and not self.asked.coming.done()

    def settle(self, step: int) -> None:
        """Be done with recalling until the row has seen more than ``step`` tokens."""
        self.settled, self.rounds = step, 0

    def drop(self) -> None:
        """Give up what is on its way; doing so twice is not an error."""
        if self.asked is not None:
            self.asked.coming.cancel()
            self.asked = None
