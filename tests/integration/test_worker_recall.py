"""Recall through a real worker, manager and Redis: as in one process, and a counted miss whatever fails."""

import asyncio

import grpc
import pytest
from support.conversations import FIRST, NEW, ask, workers
from support.tiny_models import random_tokens
from support.tiny_worker import metrics, request, tiny_loaded
from support.waiting import until

from scissorhands.evaluation.decoding import Decoder
from scissorhands.evaluation.recalling import Recall
from scissorhands.recall import ROUNDS
from scissorhands.v1 import recall_pb2
from scissorhands.wire import read_grant

PROMPT = random_tokens(180, seed=5).tolist()
MORE = random_tokens(40, seed=6).tolist()
SLOTS = 48
BOTH = recall_pb2.Recall(share=0.5, every_tokens=4)
AT_THE_END = recall_pb2.Recall(share=0.5)
# No recall is late because the machine is busy.
PATIENT = {"recall_deadline": 30}


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url)


def expected(accepted, recall, prompt=PROMPT):
    """Return what one process without services answers, and how many slots it recalls."""
    how = Recall(recall.share, every=recall.every_tokens)
    decoder = Decoder(tiny_loaded().model, read_grant(accepted.grant), [prompt], NEW, how)
    (tokens,) = decoder.answer(NEW)
    return tokens, decoder.recallers[0].recalled


def misses(finish):
    return {miss.reason: miss.count for miss in finish.cache.recall_misses}


@pytest.mark.parametrize("recall", [AT_THE_END, BOTH], ids=["at_the_end", "every_four"])
@pytest.mark.parametrize(("policy", "codec"), [("scissorhands", "none"), ("h2o", "int8"), ("tova", "none")])
async def test_a_worker_recalls_what_one_process_does(manager, policy, codec, recall):
    async with workers(manager, 1, **PATIENT) as ((worker, stub),):
        asked = {"slots": SLOTS, "policy": policy, "resident_codec": codec}
        accepted, tokens, finish = await ask(stub, PROMPT, recall=recall, **asked)
        again = await ask(stub, PROMPT, recall=recall, **asked)
        _, plain, without = await ask(stub, PROMPT, **asked)
        figures = metrics(worker)
    wanted, slots = expected(accepted, recall)
    assert (tokens, finish.cache.recalled_slots) == (wanted, slots)
    assert slots > 0
    assert misses(finish) == misses(again[2]) == misses(without) == {}
    assert again[1] == tokens != plain
    assert finish.cache.recalled_sections > 0
    assert without.cache.recalled_slots == 0
    assert finish.cache.allocated_bytes == without.cache.allocated_bytes
    assert figures["scissorhands_worker_recalled_slots_total"] == 2 * slots
    assert figures['scissorhands_worker_recalls_total{result="missed"}'] == 0
    assert manager.metric("recalls_total") == figures['scissorhands_worker_recalls_total{result="recalled"}']


async def test_rows_recall_alike_alone_and_together(manager):
    prompts = [PROMPT, random_tokens(150, seed=8).tolist(), random_tokens(205, seed=9).tolist()]
    asked = {"slots": SLOTS, "policy": "h2o", "recall": BOTH}
    async with workers(manager, 1, **PATIENT) as ((_, stub),):
        alone = [(await ask(stub, prompt, **asked))[1] for prompt in prompts]
        together = await asyncio.gather(*(ask(stub, prompt, **asked) for prompt in prompts))
    assert [tokens for _, tokens, _ in together] == alone
    assert all(finish.cache.recalled_slots and not misses(finish) for _, _, finish in together)


async def test_a_short_prompt_has_nothing_to_recall(manager):
    async with workers(manager, 1) as ((_, stub),):
        _, tokens, finish = await ask(stub, FIRST[:20], new=5, slots=SLOTS, policy="h2o", recall=AT_THE_END)
        _, plain, _ = await ask(stub, FIRST[:20], new=5, slots=SLOTS, policy="h2o")
    assert tokens == plain
    assert (finish.cache.recalled_slots, misses(finish)) == (0, {})


async def test_without_a_manager_the_answer_is_that_without_recall(manager):
    asked = {"slots": SLOTS, "policy": "h2o"}
    async with workers(manager, 1) as ((_, stub),):
        _, plain, _ = await ask(stub, PROMPT, **asked)
    async with workers(manager, 1, manager_deadline=1) as ((worker, stub),):
        manager.kill()
        await until(lambda: metrics(worker)["scissorhands_worker_manager_up"] == 0, "the loss of the manager")
        _, tokens, finish = await ask(stub, PROMPT, recall=BOTH, **asked)
        figures = metrics(worker)
    assert tokens == plain
    assert finish.cache.recalled_slots == 0
    assert misses(finish).keys() == {"manager_unavailable"}
    missed = figures['scissorhands_worker_recall_misses_total{reason="manager_unavailable"}']
    assert missed == misses(finish)["manager_unavailable"]


async def test_with_the_store_gone_the_answer_is_that_without_recall(manager, redis_server):
    asked = {"slots": SLOTS, "policy": "h2o"}
    async with workers(manager, 1, **PATIENT) as ((_, stub),):
        _, plain, _ = await ask(stub, PROMPT, **asked)
        redis_server.kill()
        _, tokens, finish = await ask(stub, PROMPT, recall=AT_THE_END, **asked)
    assert tokens == plain
    assert finish.cache.recalled_slots == 0
    assert misses(finish) == {"store_unavailable": 1}


async def test_while_a_row_waits_in_vain_the_others_go_on(start_manager, redis_server):
    """The store hangs: the recall is late, and a request that came after it is answered meanwhile."""
    manager = start_manager(store_url=redis_server.url, store_timeout=20)
    asked = {"slots": SLOTS, "policy": "h2o"}
    async with workers(manager, 1, recall_deadline=4) as ((_, stub),):
        _, plain, _ = await ask(stub, PROMPT, **asked)
        redis_server.pause()
        waiting = asyncio.create_task(ask(stub, PROMPT, recall=AT_THE_END, **asked))
        await asyncio.sleep(0)
        _, other, _ = await ask(stub, MORE, slots=SLOTS, policy="h2o", no_prefix_cache=True)
        assert not waiting.done()
        _, tokens, finish = await waiting
        redis_server.resume()
        assert other == (await ask(stub, MORE, slots=SLOTS, policy="h2o", no_prefix_cache=True))[1]
    assert tokens == plain
    assert misses(finish) == {"late": 1}


def flip(redis_server, key):
    """Flip a bit in the middle of a stored value."""
    size = int(redis_server.command("STRLEN", key)[1:])
    old = redis_server.command("GETRANGE", key, size // 2, size // 2).split(b"\r\n")[1]
    redis_server.command("SETRANGE", key, size // 2, bytes([old[0] ^ 1]))


async def second_turn(manager, session, break_it, recall):
    """Hold two turns of a conversation that recalls, break something in between, and return the second's end."""
    more = {"slots": SLOTS, "policy": "h2o", "session_id": session}
    async with workers(manager, 1, **PATIENT) as ((_, stub),):
        _, answer, _ = await ask(stub, PROMPT, recall=AT_THE_END, **more)
        break_it()
        _, tokens, finish = await ask(stub, PROMPT + answer + MORE, recall=recall, **more)
    return tokens, finish


async def test_a_next_turn_recalls_from_the_turns_before(manager):
    tokens, finish = await second_turn(manager, "c1", lambda: None, AT_THE_END)
    again = await second_turn(manager, "c2", lambda: None, AT_THE_END)
    plain, _ = await second_turn(manager, "c3", lambda: None, None)
    assert finish.cache.recalled_slots > 0
    assert misses(finish) == {}
    assert tokens == again[0] != plain


@pytest.mark.parametrize("damage", ["lost", "flipped"])
async def test_a_broken_segment_is_a_miss_and_the_others_are_recalled(manager, redis_server, damage):
    key = "scissorhands:{default/c1}:segment:1"

    def break_it():
        if damage == "lost":
            redis_server.command("DEL", key)
        else:
            flip(redis_server, key)

    _, finish = await second_turn(manager, "c1", break_it, AT_THE_END)
    # In each round in which something of it was wanted.
    ((kind, count),) = misses(finish).items()
    assert kind == ("absent" if damage == "lost" else "corrupt")
    assert 1 <= count <= ROUNDS
    assert finish.cache.recalled_slots > 0


async def test_segments_without_a_summary_are_a_miss(manager):
    more = {"slots": SLOTS, "policy": "h2o", "session_id": "c1"}
    async with workers(manager, 1, **PATIENT) as ((_, stub),):
        _, answer, _ = await ask(stub, PROMPT, **more)
        _, _, finish = await ask(stub, PROMPT + answer + MORE, recall=AT_THE_END, **more)
    assert "no_summary" in misses(finish)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan")])
async def test_a_share_out_of_range_is_refused(manager, share):
    async with workers(manager, 1) as ((_, stub),):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, PROMPT, recall=recall_pb2.Recall(share=share))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "recall.share" in caught.value.details()


async def test_a_request_that_goes_away_while_it_waits_frees_its_row(start_manager, redis_server):
    manager = start_manager(store_url=redis_server.url, store_timeout=20)
    async with workers(manager, 1, recall_deadline=30) as ((worker, stub),):
        await ask(stub, PROMPT, slots=SLOTS, policy="h2o")
        redis_server.pause()
        call = stub.Generate(request(PROMPT, new=NEW, slots=SLOTS, policy="h2o", recall=AT_THE_END))
        async for event in call:
            if event.prefill.done > len(PROMPT) - 20:
                break
        call.cancel()
        await until(lambda: metrics(worker)["scissorhands_worker_rows"] == 0, "the row")
        redis_server.resume()
    assert worker.cache.allocated_bytes() == 0
