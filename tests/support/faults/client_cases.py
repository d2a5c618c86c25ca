"""What clients and others on the network do to a worker: storms, cancels, slow readers, garbage, idle connections."""

import asyncio
import random
from contextlib import suppress

import psutil
from support.faults.case import collector

CASES, case = collector()


@case("Two dozen answers are cancelled by their clients", "Each ends at once; the others are whole.", short=True)
async def answers_cancelled(trial):
    rng = random.Random(1)

    def cancel(stream):
        stream.cancel()

    questions = [rng.choice(trial.questions.short) for _ in range(24)]
    cancelled = asyncio.gather(
        *(trial.ask(each, after=rng.randrange(len(each.tokens)), then=cancel) for each in questions)
    )
    trial.allow(await trial.ask_all(trial.questions.short), "OK")
    trial.allow(await cancelled, "CANCELLED", "OK")


@case(
    "200 clients ask at once, more than queue and rows hold",
    "Each is answered whole or refused at once with RESOURCE_EXHAUSTED.",
)
async def client_storm(trial):
    questions = [trial.questions.short[number % 3] for number in range(200)]
    found = await trial.ask_all(questions, timeout=50)
    trial.allow(found, "OK", "RESOURCE_EXHAUSTED")
    refused = [outcome for outcome in found if outcome.code != "OK"]
    trial.must(len(found) - len(refused) >= 64, "fewer are answered than the queue holds")
    trial.must(bool(refused), "none is refused")


@case("Clients read an event every 50 ms", "Their answers are whole, and others' are not held up.")
async def slow_readers(trial):
    slow = asyncio.gather(*(trial.ask(each, pause=0.05, timeout=50) for each in trial.questions.long))
    found = await trial.ask_all(trial.questions.short)
    trial.allow(found, "OK")
    trial.must(not slow.done(), "the slow readers were done first")
    trial.allow(await slow, "OK")


@case("Calls have deadlines of 50 ms", "They end with DEADLINE_EXCEEDED and leave nothing.")
async def short_deadlines(trial):
    found = await trial.ask_all(trial.questions.long * 4, timeout=0.05)
    trial.allow(found, "DEADLINE_EXCEEDED", "OK")
    trial.allow(await trial.ask_all(trial.questions.short), "OK")


@case("200 connections are opened to a worker and say nothing", "Others are answered as ever.")
async def idle_connections(trial):
    opened = [await asyncio.open_connection("127.0.0.1", trial.lane.worker.port) for _ in range(200)]
    trial.allow(await trial.ask_all(trial.questions.short), "OK")
    for _, writer in opened:
        writer.close()


@case("A worker and a manager are sent bytes that are no HTTP/2", "Others are answered as ever.")
async def garbage(trial):
    rng = random.Random(2)
    for port in (trial.lane.worker.port, trial.lane.manager.port) * 50:
        with suppress(OSError):  # They may close it at any time.
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rng.randbytes(rng.randrange(1, 5000)))
            await writer.drain()
            writer.close()
    trial.allow(await trial.ask_all(trial.questions.short), "OK")


@case(
    "A worker may open no more file descriptors",
    "Answers on connections that are there are whole; new connections are served when it may again.",
)
async def no_descriptors(trial):
    process = psutil.Process(trial.lane.worker.pid)
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    begun = asyncio.gather(*(trial.ask(each, timeout=30) for each in trial.questions.long))
    await asyncio.sleep(0.1)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), usual[1]))
    try:
        new = await trial.ask_all(trial.questions.short[:3], timeout=3)
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, usual)
    trial.allow(await begun, "OK", "UNAVAILABLE")
    trial.allow(new, "OK", "UNAVAILABLE", "DEADLINE_EXCEEDED")


@case("The disk that a worker logs to is full", "It starts and answers all the same.")
async def log_disk_full(trial):
    worker = trial.lane.worker
    usual, worker.log = worker.log, "/dev/full"
    try:
        await asyncio.to_thread(worker.kill)
        await asyncio.to_thread(worker.start)
        trial.allow(await trial.during("manager-killed"), "OK")
    finally:
        worker.log = usual
        await asyncio.to_thread(worker.kill)


@case(
    "Store, managers and workers are all killed at once and start anew",
    "Calls are told UNAVAILABLE; all is found again, and answers are whole.",
    seconds=90,
)
async def everything_killed(trial):
    begun = [asyncio.create_task(trial.ask(each, timeout=10)) for each in trial.questions.long]
    await asyncio.sleep(0.2)
    for lane in trial.stack.lanes:
        for part in (lane.worker, lane.manager):
            await asyncio.to_thread(part.kill)
    await asyncio.to_thread(trial.stack.redis.kill)
    trial.allow(await asyncio.gather(*begun), "OK", "UNAVAILABLE")
    await trial.stack.heal()
    trial.allow(await trial.ask_all(trial.questions.short, timeout=30), "OK")


@case("A manager is killed and started five times in a row", "All answers are whole; clients notice nothing.")
async def manager_flapping(trial):
    for _ in range(5):
        trial.allow(await trial.during("manager-killed", hold=0.2, timeout=30), "OK")


@case("Store, manager and lines fail one within the other", "All answers are whole; clients notice nothing.")
async def faults_at_once(trial):
    async with trial.fault("store-partitioned"), trial.fault("manager-far"):
        trial.allow(await trial.during("clock-a-day-ahead", timeout=30), "OK")
        trial.allow(await trial.during("manager-stopped", hold=2, timeout=30), "OK")
