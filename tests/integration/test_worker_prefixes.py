"""Prompts that begin alike, through real workers, a manager and a Redis: read once, answered as if each were read."""

import asyncio

import pytest
from support.conversations import NEW, ask, workers
from support.shared_prompts import ENDS, FULL, SETTINGS, SHARED, answer, counts, options, stored
from support.tiny_worker import metrics


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url)


@pytest.mark.parametrize(
    ("policy", "slots", "codec", "reused"),
    [
        ("full", 0, "none", 192),
        ("full", 0, "int8", 192),
        ("h2o", 120, "none", 208),
        ("scissorhands:counts", 120, "none", 208),
        ("tova", 120, "turboquant:k4v3", 208),
        ("merged:h2o", 120, "none", 208),
    ],
)
async def test_answers_are_those_of_a_prompt_that_is_read(manager, policy, slots, codec, reused):
    more = options(policy, codec, slots=slots)
    prompt = SHARED + ENDS[0]
    async with workers(manager, **SETTINGS) as ((one, first), (two, second)):
        alone, nothing = await answer(first, prompt, no_prefix_cache=True, **more)
        cold, unread = await answer(first, prompt, **more)
        await stored(one)
        warm = [await answer(stub, prompt, **more) for stub in (second, first)]
        assert (nothing, unread) == (0, 0)
        assert cold == alone
        assert warm == [(alone, reused)] * 2
        assert counts(one) == {"new": 1, "hit": 1}
        assert counts(two) == {"hit": 1}
        assert metrics(two)["scissorhands_worker_prefix_tokens_total"] == reused
        assert metrics(two)["scissorhands_worker_prompt_tokens_total"] == len(prompt) - reused
        # What is stored is not stored again.
        assert counts(two, "stores") == {}


async def test_prompts_that_go_apart_share_what_they_begin_with(manager, redis_server):
    async with workers(manager, **SETTINGS) as ((one, first), (two, second)):
        alone = [await answer(first, SHARED + end, no_prefix_cache=True, **FULL) for end in ENDS]
        assert redis_server.holds_nothing()
        found = []
        for number, end in enumerate(ENDS):
            found.append(await answer((first, second)[number % 2], SHARED + end, **FULL))
            await stored(one, two)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
        assert [reused for _, reused in found] == [0] + [192] * 9
        # One copy, whoever uses it: each of six boundaries has a record, a part that grew and its evidence.
        assert counts(one, "stores") == {"stored": 6}
        assert counts(two, "stores") == {}
        assert manager.metric("prefix_loaded_bytes_total") > 0
        found = redis_server.command("KEYS", "scissorhands:{default/prefix:*}:prefix:*").decode()
        assert len([line for line in found.split("\r\n") if line.startswith("scissorhands:")]) == 18


async def test_budgets_share_a_prefix_until_they_evict(manager):
    async with workers(manager, **SETTINGS) as ((one, first), (_, second)):
        small, large = options("h2o", slots=120), options("h2o", slots=170)
        await answer(first, SHARED + ENDS[0], **small)
        await stored(one)
        alone, _ = await answer(first, SHARED + ENDS[1], no_prefix_cache=True, **large)
        assert await answer(second, SHARED + ENDS[1], **large) == (alone, 96)
        # Of another policy nothing is.
        alone, _ = await answer(first, SHARED, no_prefix_cache=True, **options("tova", slots=120))
        assert await answer(second, SHARED, **options("tova", slots=120)) == (alone, 0)


async def test_behind_an_eviction_the_place_where_prompts_go_apart_is_learned(manager):
    more = options("h2o", slots=120)
    long = [end * 5 for end in ENDS]
    async with workers(manager, **SETTINGS) as ((one, first), (two, second)):
        found = []
        for number, end in enumerate(long[:4]):
            alone, _ = await answer(first, SHARED + end, no_prefix_cache=True, **more)
            tokens, reused = await answer((first, second)[number % 2], SHARED + end, **more)
            assert tokens == alone
            found.append(reused)
            await stored(one, two)
        # The first leaves where it ends, the second what both had begun with too.
        assert found == [0, 96, 192, 192]


async def test_of_prompts_at_once_each_is_answered_as_alone(manager):
    """Each has a canary of its own behind what all share."""
    async with workers(manager, rows=4, **SETTINGS) as ((one, first), (two, second)):
        prompts = [SHARED + end for end in ENDS[:8]]
        alone = [(await answer(first, prompt, no_prefix_cache=True, **FULL))[0] for prompt in prompts]
        for _ in range(2):
            together = await asyncio.gather(
                *(answer((first, second)[number % 2], prompt, **FULL) for number, prompt in enumerate(prompts))
            )
            assert [tokens for tokens, _ in together] == alone
            await stored(one, two)
        assert all(reused == 192 for _, reused in together)
        # Of those who stored a boundary at once one has, and the others found it there.
        assert counts(one, "stores").get("stored", 0) + counts(two, "stores").get("stored", 0) == 6
        assert len({tuple(tokens) for tokens in alone}) == 8


async def test_a_session_begins_with_a_prefix_and_goes_on_from_its_row(manager):
    async with workers(manager, **SETTINGS) as ((one, first), (two, second)):
        await answer(first, SHARED + ENDS[0], **FULL)
        await stored(one)
        prompt = SHARED + ENDS[1]
        alone, _ = await answer(first, prompt, no_prefix_cache=True, **FULL)
        assert await answer(second, prompt, session_id="c1", **FULL) == (alone, 192)
        again = prompt + alone + ENDS[2]
        expected, _ = await answer(first, again, no_prefix_cache=True, **FULL)
        accepted, tokens, finish = await ask(first, again, session_id="c1", **FULL)
        assert (tokens, finish.usage.prefix_tokens) == (expected, 0)
        assert accepted.resumed_tokens == len(prompt) + NEW - 1
        # What was decoded is no prefix for others.
        assert counts(two, "stores") == {}
        assert counts(one, "stores") == {"stored": 6}


async def test_a_prefix_is_compared_with_a_full_cache(manager):
    """A row that has evicted in it is no full cache, even if it evicts nothing more."""
    more = options("h2o", slots=120, shadow=True)
    async with workers(manager, **SETTINGS) as ((one, first), (_, second)):
        _, _, before = await ask(first, SHARED, **more)
        await stored(one)
        _, _, after = await ask(second, SHARED, **more)
        assert after.usage.prefix_tokens == 192
        assert after.quality.divergence.nats == pytest.approx(before.quality.divergence.nats, rel=1e-4)


async def test_a_prefix_is_left_alone_when_reading_is_faster(manager):
    async with workers(manager, **SETTINGS | {"prefix_advantage": 1e9}) as ((one, first), _):
        alone, _ = await answer(first, SHARED, **FULL)
        await stored(one)
        # Nothing is known of loading before it was tried.
        assert await answer(first, SHARED, **FULL) == (alone, 192)
        assert await answer(first, SHARED, **FULL) == (alone, 0)
        assert counts(one) == {"new": 1, "hit": 1, "slower": 1}
        assert counts(one, "stores") == {"stored": 6}


async def test_without_memory_or_boundaries_prompts_are_read(manager):
    async with (
        workers(manager, 1, **SETTINGS) as ((one, first),),
        workers(manager, 1, suspend_bytes=1000, **SETTINGS) as ((small, tight),),
        workers(manager, 1, **SETTINGS | {"prefix_tokens": 0}) as ((off, without),),
    ):
        alone, _ = await answer(first, SHARED, **FULL)
        await stored(one)
        assert await answer(tight, SHARED, **FULL) == (alone, 0)
        assert await answer(tight, [*SHARED[1:], 5], **FULL) != (alone, 0)
        assert counts(small) == {"no_room": 1, "new": 1}
        assert counts(small, "stores") == {"no_room": 6}
        assert await answer(without, SHARED, **FULL) == (alone, 0)
        assert counts(off) == {}
        # One that is too short has no boundary.
        await answer(first, SHARED[:32], **FULL)
        assert counts(one) == {"new": 1}
