"""Clients of a soak: each asks what it draws, cancels some, and asks anew what was not answered."""

import asyncio
import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from support.faults.load import HANGS, ask

from scissorhands_client import AsyncClient

# Share of answers that are cancelled, and of those that are read slowly.
_CANCELLED, _SLOW = 0.15, 0.05
# Deadline of a question, in seconds: short, so that a stopped worker is noticed.
DEADLINE = 12.0
# Statuses that a client may be told when a fault is felt, and when another turn of its session still ends.
FELT = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
CONFLICT = "ABORTED"
# How long a fault is felt after its end: connections are made anew within it, in seconds.
AFTERMATH = 6.0


@dataclass
class Felt:
    """When faults were felt, by lane: pairs of begin and end in seconds of ``time.monotonic``."""

    times: dict[str, list[list[float]]] = field(default_factory=dict)

    def begin(self, lane):
        self.times.setdefault(lane, []).append([time.monotonic(), float("inf")])

    def end(self, lane):
        self.times[lane][-1][1] = time.monotonic() + AFTERMATH

    def between(self, lane, begin, end):
        """Tell whether one was felt at some time between two."""
        return any(first <= end and begin <= last for first, last in self.times.get(lane, []))


@dataclass
class Tally:
    """What became of all questions.

    Args:
        outcomes: How many ended with each status.
        answered: Questions that were answered in the end.
        retried: Questions that were asked more than once.
        asked: Questions that were asked.
        resumed: Turns that went on from a kept row.
        broken: What was promised and did not hold.
    """

    outcomes: Counter = field(default_factory=Counter)
    asked: int = 0
    answered: int = 0
    cancelled: int = 0
    retried: int = 0
    resumed: int = 0
    broken: list[str] = field(default_factory=list)


class RandomClient:
    """One client; it stays with one lane, as a client that keeps its connection does.

    Args:
        lane: The lane that it asks.
        questions: What it draws from.
        seed: Seed of what it draws.
        felt: When faults are felt.
        tally: Where it counts.
    """

    def __init__(self, lane, questions, seed, felt, tally):
        self._lane, self._questions, self._felt, self._tally = lane, questions, felt, tally
        self._random = random.Random(seed)

    async def run(self, end):
        """Ask until ``end``, in seconds of ``time.monotonic``; what is begun is brought to its end."""
        async with AsyncClient(self._lane.address, timeout=DEADLINE) as client:
            while time.monotonic() < end:
                if self._random.random() < 0.25:
                    chosen = self._random.choice(self._questions.conversations)
                    for turn in chosen.named(uuid.UUID(int=self._random.getrandbits(128)).hex):
                        await self._answered(client, turn)
                else:
                    kind = self._questions.long if self._random.random() < 0.2 else self._questions.short
                    await self._answered(client, self._random.choice(kind))

    async def _answered(self, client, question):
        """Ask until there is an answer, or it is cancelled."""
        self._tally.asked += 1
        given_up = time.monotonic() + 15 * DEADLINE
        for attempt in range(1000):
            cancel = self._random.random() < _CANCELLED
            after = self._random.randrange(len(question.tokens)) if cancel else 0
            pause = 0.02 if self._random.random() < _SLOW else 0.0
            outcome = await ask(
                client, question, timeout=DEADLINE, after=after, then=_cancel if cancel else None, pause=pause
            )
            self._tally.outcomes[outcome.code] += 1
            self._judge(outcome, cancel)
            if outcome.accepted is not None and outcome.accepted.resumed_tokens:
                self._tally.resumed += 1
            if outcome.code == "OK":
                self._tally.answered += 1
            elif outcome.code == "CANCELLED":
                self._tally.cancelled += 1
            if outcome.code in {"OK", "CANCELLED"}:
                self._tally.retried += attempt > 0
                return
            if time.monotonic() > given_up:
                break
            await asyncio.sleep(self._random.uniform(0.05, 0.3))
        self._tally.broken.append(f"lane {self._lane.name}: a question was never answered, last {outcome.code}")

    def _judge(self, outcome, cancelled):
        if outcome.is_wrong:
            self._tally.broken.append(f"wrong tokens of {outcome.question.options} with {outcome.code}")
        felt = self._felt.between(self._lane.name, outcome.began, outcome.began + outcome.seconds)
        right = {"OK"} | ({"CANCELLED"} if cancelled else set()) | (FELT if felt else set())
        if outcome.question.options.session_id:
            # Its last turn's end, or its lease, may have been lost with a part.
            right |= {CONFLICT}
        if outcome.code == HANGS or outcome.code not in right:
            said = outcome.error.details if outcome.error else ""
            self._tally.broken.append(f"lane {self._lane.name}: {outcome.code} {said}".strip())


def _cancel(stream):
    stream.cancel()
