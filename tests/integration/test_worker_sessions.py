"""Conversations whose cache is kept between turns, through real workers, a manager and a Redis."""

import asyncio

import grpc
import pytest
from support.conversations import FIRST, NEW, SECOND, THIRD, ask, converse, results, workers
from support.speaker import Speaker
from support.tiny_models import random_tokens
from support.tiny_worker import metrics, tiny_loaded

from scissorhands.v1 import budget_pb2, cache_manager_pb2_grpc, suspension_pb2

# Of each of many conversations.
TURNS = 20


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url)


async def test_a_full_conversation_is_that_of_one_that_was_never_suspended(manager):
    async with workers(manager) as ((one, first), (two, second)):
        more = {"policy": "full"}
        alone, nothing = await converse([first] * 3, **more)
        kept, resumed = await converse([first, second, first], session_id="c1", **more)
        assert kept == alone
        assert nothing == [0, 0, 0]
        # All but the last token of each answer, which nobody has read.
        lengths = [len(FIRST) + NEW - 1, len(FIRST) + len(SECOND) + 2 * NEW - 1]
        assert resumed == [0, *lengths]
        assert results(one) == {"new": 1, "resumed": 1}
        assert results(two) == {"resumed": 1}
        assert metrics(one)["scissorhands_worker_resumed_tokens_total"] == lengths[1]
        # The last token of an answer is read with the next turn.
        again = sum(map(len, (FIRST, SECOND, THIRD))) + 2
        alone_read = 3 * len(FIRST) + 2 * (NEW + len(SECOND)) + NEW + len(THIRD)
        read = sum(metrics(worker)["scissorhands_worker_prompt_tokens_total"] for worker in (one, two))
        assert read == alone_read + again


@pytest.mark.parametrize(
    ("policy", "codec"),
    [("scissorhands:counts", "none"), ("h2o", "none"), ("h2o", "int8"), ("tova", "turboquant:k4v3")],
)
async def test_with_eviction_it_is_that_of_a_row_that_stayed_in_memory(manager, policy, codec):
    async with workers(manager) as ((_, first), (_, second)):
        more = {"policy": policy, "slots": 40, "resident_codec": codec}
        kept, resumed = await converse([first, second, first], session_id="c1", **more)
    speaker = Speaker(tiny_loaded().model, policy, codec=codec)
    row, ids = speaker.cache.add_row(speaker.grant), []
    for turn in (FIRST, SECOND, THIRD):
        ids += turn
        speaker.turn(row, ids, NEW)
    assert kept == ids
    assert row.epoch > 3
    assert all(resumed[1:])


async def test_a_share_of_a_longer_conversation_is_more_slots(manager):
    async with workers(manager) as ((one, first), (_, second)):
        budget = {"budget": budget_pb2.Budget(fraction=0.6), "session_id": "c1"}
        before, tokens, _ = await ask(first, FIRST, **budget)
        ids = [*FIRST, *tokens, *SECOND]
        after, _, finish = await ask(second, ids, **budget)
        assert after.resumed_tokens == len(FIRST) + NEW - 1
        assert after.grant.layer_slots[0] > before.grant.layer_slots[0]
        assert finish.cache.allocated_bytes == after.grant.bytes
        assert results(one) == {"new": 1}


async def test_a_resumed_turn_is_compared_with_a_full_cache(manager):
    """A row that has evicted before is no full cache, even if it evicts nothing in this turn."""
    async with workers(manager) as ((_, first), (_, second)):
        more = {"policy": "h2o", "session_id": "c1"}
        _, tokens, _ = await ask(first, FIRST, slots=40, shadow=True, **more)
        ids = [*FIRST, *tokens, *SECOND]
        accepted, _, finish = await ask(second, ids, slots=40, shadow=True, **more)
        assert accepted.resumed_tokens
        compared = finish.quality.divergence
        assert compared.tokens == NEW
        assert compared.nats > 0


async def test_what_a_turn_cannot_go_on_from_is_read_anew(manager):
    async with workers(manager) as ((one, first), (two, second)):
        more = {"policy": "h2o", "slots": 40, "new": 6}
        _, tokens, _ = await ask(first, FIRST, session_id="c1", **more)
        ids = [*FIRST, *tokens, *SECOND]
        changed = [*ids[:30], ids[30] + 1, *ids[31:]]
        for result, prompt, options in (
            ("tokens", changed, more),
            ("tokens", FIRST, more),
            ("mismatch", ids, more | {"slots": 44}),
            ("mismatch", ids, more | {"policy": "tova"}),
            ("mismatch", ids, more | {"resident_codec": "int8"}),
        ):
            before = results(two).get(result, 0)
            (accepted, found, _), (_, alone, _) = [
                await ask(second, prompt, session_id=name, **options) for name in ("c1", "")
            ]
            assert (accepted.resumed_tokens, found) == (0, alone)
            assert results(two)[result] == before + 1
            # It leaves a row of its own; the one before is kept again.
            await ask(first, FIRST, session_id="c1", **more)
        assert results(one, "suspends") == {"suspended": 6}


async def test_nothing_is_kept_of_whoever_does_not_ask(manager, redis_server):
    async with workers(manager, 1) as ((worker, stub),), workers(manager, 1, suspend_bytes=0) as ((off, without),):
        accepted, _, _ = await ask(stub, FIRST, policy="full")
        assert len(accepted.session_id) == 24
        accepted, _, finish = await ask(without, FIRST, policy="full", session_id="c1")
        assert accepted.session_id != "c1"
        assert finish.cache.suspended_bytes == 0
        assert results(worker) == results(off) == {}
        assert redis_server.holds_nothing()
        for bad in ("a b", "x" * 65, "\u00e9"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(stub, FIRST, session_id=bad)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_rows_for_which_there_is_no_memory_are_not_kept(manager):
    async with workers(manager, 1) as ((_, stub),), workers(manager, 1, suspend_bytes=1000) as ((small, tight),):
        await converse([stub], [FIRST], session_id="c1", policy="full")
        ids, resumed = await converse([stub, stub], [FIRST, SECOND], session_id="c2", policy="full")
        _, tokens, finish = await ask(tight, ids, session_id="c2", policy="full")
        assert results(small) == results(small, "suspends") == {"no_room": 1}
        assert finish.cache.suspended_bytes == 0
        # What was kept before is still there.
        accepted, again, _ = await ask(stub, ids, session_id="c2", policy="full")
        assert accepted.resumed_tokens == len(ids) - 1
        assert (again, resumed[0]) == (tokens, 0)


async def test_many_conversations_at_once_stay_apart(manager, redis_server):
    """Each holds a canary of its own, after a beginning that all share; answers are those that it gets alone."""
    async with workers(manager, rows=4) as ((one, first), (two, second)):
        canaries = [random_tokens(6, seed=100 + number).tolist() for number in range(8)]

        async def talk(number, **more):
            stubs = [(first, second)[(number + turn) % 2] for turn in range(TURNS)]
            turns = [[*FIRST[:30], *canaries[number]], *([canaries[number]] * (TURNS - 1))]
            return await converse(stubs, turns, policy="full", new=12, **more)

        together = await asyncio.gather(*(talk(number, session_id=f"c{number}") for number in range(8)))
        alone = [await talk(number, no_prefix_cache=True) for number in range(8)]
        assert [ids for ids, _ in together] == [ids for ids, _ in alone]
        assert len({tuple(ids) for ids, _ in together}) == 8
        assert all(all(resumed[1:]) for _, resumed in together)
        assert results(one).keys() | results(two).keys() == {"new", "resumed"}
        held = "scissorhands_worker_suspension_held_bytes"
        assert metrics(one)[held] == metrics(two)[held] == 0
        async with grpc.aio.insecure_channel(manager.address) as channel:
            stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
            for number in range(8):
                request_ = suspension_pb2.DeleteSessionRequest(session_id=f"c{number}")
                assert (await stub.DeleteSession(request_, timeout=10)).deleted == 2
        assert redis_server.holds_nothing()
