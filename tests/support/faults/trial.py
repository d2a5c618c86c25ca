"""One case's life: a fault, what clients get meanwhile, and what must hold whatever the fault was."""

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager

from support.faults.injected import FAULTS
from support.faults.load import HANGS, ask
from support.faults.stack import until

from scissorhands_client import AsyncClient

# What a process may take more after a case than before: pools and connections that are kept.
MORE_BYTES, MORE_DESCRIPTORS = 64 << 20, 24


class Trial:
    """What a case is given.

    Args:
        stack: The system.
        questions: What to ask.

    Attributes:
        outcomes: What became of all that was asked.
        notes: What else happened, in words.
        broken: What was promised and did not hold.
    """

    def __init__(self, stack, questions):
        self.stack, self.questions = stack, questions
        self.outcomes, self.notes, self.broken = [], [], []
        self.lane, self.other = stack.lanes

    def must(self, holds, what):
        """Note a broken promise unless it holds."""
        if not holds:
            self.broken.append(what)

    def allow(self, outcomes, *codes):
        """Note a broken promise for each outcome whose status is none of these."""
        for outcome in outcomes:
            said = outcome.error.details if outcome.error else ""
            self.must(outcome.code in codes, f"{outcome.code}: {said}")

    async def ask(self, question, lane=None, **options):
        """Ask one question through a connection of its own, and note what becomes of it."""
        async with AsyncClient((lane or self.lane).address) as client:
            outcome = await ask(client, question, **options)
        self.outcomes.append(outcome)
        return outcome

    async def ask_all(self, questions, lane=None, **options):
        """Ask several at once."""
        return await asyncio.gather(*(self.ask(question, lane, **options) for question in questions))

    @asynccontextmanager
    async def fault(self, name, lane=None):
        """Let something go wrong for a while."""
        async with FAULTS[name].hold(self.stack, lane or self.lane):
            yield

    async def during(self, name, lane=None, hold=1.0, **options):
        """Begin a fault in the middle of some answers, ask more while it lasts, and return what became of all.

        Args:
            name: The fault.
            lane: Which lane it hits, and is asked; None takes the first.
            hold: How long it lasts at least, in seconds.
            options: Of each question.
        """
        begun = asyncio.Event()

        def tell(stream):
            begun.set()

        first = asyncio.gather(
            *(self.ask(question, lane, after=10, then=tell, **options) for question in self.questions.long)
        )
        await asyncio.wait([asyncio.create_task(begun.wait()), first], return_when=asyncio.FIRST_COMPLETED)
        async with self.fault(name, lane):
            at = time.monotonic()
            more = await self.ask_all(self.questions.short, lane, **options)
            await asyncio.sleep(max(0.0, hold - (time.monotonic() - at)))
        return [*await first, *more]

    async def converse(self, lanes, between=None):
        """Hold a conversation, each turn on one lane; ``between`` is awaited between both. Return their outcomes."""
        turns = self.questions.conversations[0].named(f"case-{time.monotonic_ns()}")
        found = [await self.ask(turns[0], lanes[0])]
        if between is not None:
            await between()
        return [*found, await self.ask(turns[1], lanes[1])]


async def tried(case, stack, questions):
    """Run a case and return what there is to tell of it."""
    trial, began, before = Trial(stack, questions), time.monotonic(), stack.usage()
    try:
        async with asyncio.timeout(case.seconds):
            await case.run(trial)
    except TimeoutError:
        trial.broken.append(f"not done within {case.seconds} s")
    except AssertionError as error:
        trial.broken.append(f"{error}")
    seconds = time.monotonic() - began
    await _recovered(trial)
    for outcome in trial.outcomes:
        trial.must(not outcome.is_wrong, f"wrong tokens with {outcome.code}")
        trial.must(outcome.code != HANGS, "a call that hangs")
    _compare(trial, before)
    return {
        "name": case.name,
        "fault": case.fault,
        "promised": case.promised,
        "happened": _told(trial),
        "broken": trial.broken,
        "seconds": round(seconds, 1),
        "answers": dict(sorted(Counter(outcome.code for outcome in trial.outcomes).items())),
    }


async def _recovered(trial):
    """Take the fault away; then both lanes must answer as ever, and nothing may be left."""
    stack = trial.stack
    try:
        await stack.heal()
        for lane in stack.lanes:
            async with AsyncClient(lane.address) as client:
                await client.wait_ready(20)
                outcome = await ask(client, trial.questions.short[0])
            trial.must(outcome.code == "OK" and not outcome.is_wrong, f"after it an answer was {outcome.code}")
        await until(lambda: not stack.gauges(), "the gauges to be zero")
    except AssertionError as error:
        trial.broken.append(f"{error}: {stack.gauges()}")


def _compare(trial, before):
    """Note what processes that are still the same take more than before."""
    for key, (resident, descriptors) in trial.stack.usage().items():
        if key in before:
            more = resident - before[key][0]
            trial.must(more < MORE_BYTES, f"{key[0]} took {more >> 20} MiB more")
            more = descriptors - before[key][1]
            trial.must(more < MORE_DESCRIPTORS, f"{key[0]} took {more} descriptors more")


def _told(trial):
    """Return in words what happened."""
    codes = Counter(outcome.code for outcome in trial.outcomes)
    whole = codes.pop("OK", 0)
    words = [f"{whole} of {len(trial.outcomes)} answers whole"] if trial.outcomes else []
    words += [f"{count} {code}" for code, count in sorted(codes.items())]
    slowest = max((outcome.seconds for outcome in trial.outcomes), default=0)
    words += [f"the slowest after {slowest:.1f} s"] if trial.outcomes else []
    return "; ".join([", ".join(words), *trial.notes]).strip("; ")
