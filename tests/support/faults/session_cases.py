"""Faults around conversations: between their turns, in what is kept of them, at the end of a worker."""

import asyncio
import signal

from support.faults.case import collector
from support.faults.stack import LEASE
from support.faults.trial import Trial

CASES, case = collector()
_ALIKE = "The next turn is answered as without the fault; what cannot be resumed is read anew."


def _resumed(trial: Trial, outcome, wanted):
    found = outcome.accepted.resumed_tokens if outcome.accepted else 0
    trial.notes.append(f"the second turn resumed {found} tokens")
    trial.must(bool(found) is wanted, f"the second turn resumed {found} tokens")


@case(
    "The worker that held a conversation's first turn is killed between turns",
    "The next turn goes on at another worker from the kept row.",
)
async def worker_killed_between_turns(trial):
    async def between():
        await asyncio.to_thread(trial.lane.worker.kill)

    found = await trial.converse((trial.lane, trial.other), between)
    trial.allow(found, "OK")
    _resumed(trial, found[1], wanted=True)


@case("Manager and worker of a conversation are killed between turns", "As if only the worker were.")
async def lane_killed_between_turns(trial):
    async def between():
        for part in (trial.lane.worker, trial.lane.manager):
            await asyncio.to_thread(part.kill)

    found = await trial.converse((trial.lane, trial.other), between)
    trial.allow(found, "OK")
    _resumed(trial, found[1], wanted=True)


@case("Both managers are killed between turns and come back", "The next turn goes on from the kept row.")
async def managers_restarted_between_turns(trial):
    async def between():
        for lane in trial.stack.lanes:
            await asyncio.to_thread(lane.manager.kill)
        await trial.stack.heal()

    found = await trial.converse((trial.lane, trial.other), between)
    trial.allow(found, "OK")
    _resumed(trial, found[1], wanted=True)


@case("What the store keeps of a conversation is damaged between turns", _ALIKE)
async def kept_row_damaged(trial):
    redis = trial.stack.redis

    async def between():
        found = redis.command("KEYS", "*suspended:*:0").split(b"\r\n")
        parts = [key for key in found if key.startswith(b"scissorhands")]
        trial.must(bool(parts), "no part is kept")
        for key in parts:
            redis.command("SETRANGE", key, 700, b"damaged")

    found = await trial.converse((trial.lane, trial.other), between)
    trial.allow(found, "OK")
    _resumed(trial, found[1], wanted=False)


@case("The store is emptied between turns", _ALIKE)
async def kept_row_lost(trial):
    async def between():
        trial.stack.redis.command("FLUSHALL")

    found = await trial.converse((trial.lane, trial.other), between)
    trial.allow(found, "OK")
    _resumed(trial, found[1], wanted=False)


@case("The store is out of memory when a row is to be kept", _ALIKE)
async def no_memory_to_keep_a_row(trial):
    async with trial.fault("store-out-of-memory"):
        found = await trial.converse((trial.lane, trial.other))
    trial.allow(found, "OK")
    _resumed(trial, found[1], wanted=False)


@case(
    "Two turns of one conversation are asked at two workers at once",
    "Each is answered whole or refused with ABORTED, at least one is answered.",
    short=True,
)
async def two_turns_at_once(trial):
    (turn, _) = trial.questions.conversations[1].named("twice")
    found = await asyncio.gather(*(trial.ask(turn, lane) for lane in trial.stack.lanes * 2))
    trial.allow(found, "OK", "ABORTED")
    trial.must(any(outcome.code == "OK" for outcome in found), "none was answered")


@case(
    "A worker is asked to stop (SIGTERM) during answers of conversations",
    "Each is answered or told UNAVAILABLE within the grace, the exit status is 0, and the conversations go on at "
    "another worker.",
)
async def worker_drained(trial):
    conversations = [trial.questions.conversations[0].named(f"drained-{number}") for number in range(4)]
    asked = [asyncio.create_task(trial.ask(first)) for first, _ in conversations]
    long = asyncio.create_task(trial.ask_all(trial.questions.long))
    await asyncio.sleep(0.05)
    status = await asyncio.to_thread(trial.lane.worker.terminate)
    trial.must(status == 0, f"the worker ended with {status}")
    found = [*await asyncio.gather(*asked), *await long]
    trial.allow(found, "OK", "UNAVAILABLE")
    trial.allow([await trial.ask(second, trial.other) for _, second in conversations], "OK")


@case(
    "A worker is stopped (SIGSTOP) in a turn for longer than its lease, and another goes on",
    "The other worker gets the session after the lease; the first, when it goes on, takes nothing back.",
)
async def lease_lost(trial):
    turns = trial.questions.conversations[1].named("lost")
    trial.allow([await trial.ask(turns[0])], "OK")
    running = asyncio.create_task(
        trial.ask(turns[1], timeout=10, after=2, then=lambda _: trial.lane.worker.send(signal.SIGSTOP))
    )
    await asyncio.sleep(LEASE + 2)
    trial.allow([await trial.ask(turns[1], trial.other)], "OK", "ABORTED")
    trial.lane.worker.send(signal.SIGCONT)
    trial.allow([await running], "OK", "UNAVAILABLE", "DEADLINE_EXCEEDED")
