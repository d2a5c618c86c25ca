"""Objects that go while somebody reads them: a miss of its own reason, never wrong bytes, and nothing is left."""

import pytest
from support.conversations import FIRST, SECOND, ask, results, workers
from support.manager_here import manager_here
from support.shared_prompts import ENDS, FULL, HELD, SETTINGS, SHARED, answer, counts, stored
from support.stored_objects import keys
from support.tiny_models import random_tokens
from support.tiny_worker import metrics
from support.waiting import until

from scissorhands.v1 import recall_pb2
from scissorhands_server.manager.stored import StoredSegments
from scissorhands_server.manager.stored_prefixes import StoredPrefixes
from scissorhands_server.manager.suspended_rows import SuspendedRows

WORKER = "scissorhands_worker_"
CORRUPT = [
    f'{WORKER}resumes_total{{result="corrupt"}}',
    f'{WORKER}prefix_lookups_total{{result="corrupt"}}',
    f'{WORKER}recall_misses_total{{reason="corrupt"}}',
]


def wrong_bytes(*made):
    """Return what the alert on corrupt data looks at."""
    return sum(metrics(worker)[series] for worker in made for series in CORRUPT)


def delete(redis, within, ending="*"):
    """Delete the values of owners with ``within`` in their names, as a full store or somebody else might."""
    found = [key for key in keys(redis) if within in key.partition("}")[0]]
    going = [key for key in found if ending == "*" or key.endswith(ending)]
    assert going
    redis.command("DEL", *going)


@pytest.mark.parametrize("ending", [":1", "*"], ids=["one_part", "all_of_it"])
async def test_a_prefix_that_goes_while_it_is_read(redis_server, monkeypatch, ending):
    original = StoredPrefixes.fetch
    going = [ending]

    async def fetch(own, found, index):
        if going:
            delete(redis_server, f"prefix:{found.manifest.key.hex()}", going.pop())
        return await original(own, found, index)

    async with manager_here(redis_server) as here, workers(here, **SETTINGS) as ((one, first), (two, second)):
        prompt = SHARED + ENDS[0]
        expected, _ = await answer(first, prompt, **FULL)
        await stored(one)
        monkeypatch.setattr(StoredPrefixes, "fetch", fetch)
        assert await answer(second, prompt, **FULL) == (expected, 0)
        assert counts(two) == {"missing": 1}
        await stored(two)
        # It is whole again.
        assert await answer(first, prompt, **FULL) == (expected, 192)
        assert wrong_bytes(one, two) == 0


@pytest.mark.parametrize("ending", [":0", "*"], ids=["one_part", "all_of_it"])
async def test_a_row_that_goes_while_it_is_read(redis_server, monkeypatch, ending):
    original = SuspendedRows.parts

    def parts(own, session_id, record, manifest):
        delete(redis_server, f"default/{session_id}", ending)
        return original(own, session_id, record, manifest)

    kept = {"policy": "full", "session_id": "c1", "no_prefix_cache": True}
    async with manager_here(redis_server) as here, workers(here) as ((one, first), (two, second)):
        _, tokens, _ = await ask(first, FIRST, **kept)
        ids = [*FIRST, *tokens, *SECOND]
        _, expected, _ = await ask(first, ids, policy="full", no_prefix_cache=True)
        monkeypatch.setattr(SuspendedRows, "parts", parts)
        accepted, found, _ = await ask(second, ids, **kept)
        monkeypatch.undo()
        assert (accepted.resumed_tokens, found) == (0, expected)
        assert results(two) == {"missing": 1}
        assert wrong_bytes(one, two) == 0
        await until(lambda: metrics(two)[HELD] == 0, "the row to be given up")
        # Of the row that went, no part is left: that of the second turn, or nothing.
        assert len([key for key in keys(redis_server) if key.endswith(":0")]) == (ending != "*")


@pytest.mark.parametrize("when", ["_begin", "_read", "runs"], ids=["header", "summary", "sections"])
async def test_a_segment_that_goes_while_it_is_read(redis_server, monkeypatch, when):
    """The others are recalled."""
    original = getattr(StoredSegments, when)
    prompt, more = random_tokens(180, seed=5).tolist(), random_tokens(40, seed=6).tolist()
    asked = {"slots": 48, "policy": "h2o", "session_id": "c1", "recall": recall_pb2.Recall(share=0.5)}

    def reading(own, session_id, epoch, *what):
        if epoch == 1 and any(key.endswith("c1}:segment:1") for key in keys(redis_server)):
            delete(redis_server, "default/c1", ":segment:1")
        return original(own, session_id, epoch, *what)

    async with manager_here(redis_server) as here, workers(here, 1, recall_deadline=30) as ((worker, stub),):
        _, tokens, _ = await ask(stub, prompt, **asked)
        if when == "_read":  # Else all of a small header comes with the first read.
            monkeypatch.setattr("scissorhands_server.manager.stored._FIRST_READ_BYTES", 64)
        monkeypatch.setattr(StoredSegments, when, reading)
        _, _, finish = await ask(stub, prompt + tokens + more, **asked)
        assert {miss.reason for miss in finish.cache.recall_misses} == {"absent"}
        assert finish.cache.recalled_slots > 0
        assert wrong_bytes(worker) == 0


async def test_a_segment_cut_short_is_no_missing_one(redis_server):
    async with manager_here(redis_server) as here, workers(here, 1, recall_deadline=30) as ((worker, stub),):
        prompt, more = random_tokens(180, seed=5).tolist(), random_tokens(40, seed=6).tolist()
        asked = {"slots": 48, "policy": "h2o", "session_id": "c1", "recall": recall_pb2.Recall(share=0.5)}
        _, tokens, _ = await ask(stub, prompt, **asked)
        key = next(key for key in keys(redis_server) if key.endswith("c1}:segment:1"))
        whole = redis_server.command("GET", key).partition(b"\r\n")[2][:-2]
        redis_server.command("SET", key, whole[: len(whole) // 2])
        _, _, finish = await ask(stub, prompt + tokens + more, **asked)
        assert {miss.reason for miss in finish.cache.recall_misses} == {"corrupt"}
        assert wrong_bytes(worker) > 0
