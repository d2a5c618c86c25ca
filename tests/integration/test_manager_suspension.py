"""Suspended rows through a real manager and a real Redis: parts first, the record last, one turn at a time."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_status import rpc_status
from support.manager_data import model, opened, segment, spec
from support.manager_data import offload as offload_segments
from support.processes import RedisProcess, wait_for
from support.suspended_data import (
    asked,
    manifest_for,
    resume,
    suspend,
    suspend_messages,
)

from scissorhands.suspended import PART_BYTES, cut
from scissorhands.v1 import budget_pb2, cache_manager_pb2, suspension_pb2
from scissorhands_server.manager.keeper import UNLISTED_SECONDS
from scissorhands_server.manager.suspended_rows import Record

ABORTED, DATA_LOSS = grpc.StatusCode.ABORTED, grpc.StatusCode.DATA_LOSS
FAILED_PRECONDITION, NOT_FOUND = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND
INVALID, UNAVAILABLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE
# Two parts, the first of several messages.
PIECES = cut(memoryview(bytes(range(251)) * 20_000))
DATA = b"".join(PIECES)
OWNER = "scissorhands:{default/s1}:suspended"


def keys(redis):
    """Return the names of all keys."""
    return sorted(line for line in redis.command("KEYS", "*").decode().split("\r\n") if line.startswith("scissor"))


def parts(redis):
    return [key for key in keys(redis) if key.rpartition(":")[2].isdecimal()]


def stored(redis):
    """Return the ids of the sessions that have parts in the store."""
    return {key.split("/")[1].split("}")[0] for key in parts(redis)}


async def release(stub, fence, session_id="s1"):
    """End a turn that keeps nothing, as a worker does."""
    request = cache_manager_pb2.CloseSessionRequest(session_id=session_id, fence=fence)
    with contextlib.suppress(grpc.aio.AioRpcError):  # The ledger knows nothing of sessions that were never opened.
        await stub.CloseSession(request, timeout=10)


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def reason(error):
    info = next(detail for detail in rpc_status.from_call(error).details if "ErrorInfo" in detail.type_url)
    return info.value.decode(errors="ignore")


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url, suspend_ttl=50)


async def test_a_row_waits_in_the_store_for_any_manager(manager, start_manager, redis_server, connect):
    other = start_manager(store_url=redis_server.url)
    async with connect(manager) as one, connect(other) as two:
        first = await resume(one)
        assert (first.code, first.manifest, first.data) == (NOT_FOUND, b"", b"")
        assert first.fence > 0
        written = manifest_for(asked(), PIECES).pack()
        assert await suspend(one, first.fence, PIECES) == len(DATA) + len(written)
        second = await resume(two)
        assert (second.error, second.manifest, second.data) == (None, written, DATA)
        assert second.fence > first.fence
        # What the next turn leaves takes the place of it all.
        await suspend(two, second.fence, PIECES[:1])
        assert parts(redis_server) == [f"{OWNER}:{second.fence}:0"]
        third = await resume(one)
        assert third.data == PIECES[0]
        for key in (*parts(redis_server), f"{OWNER}:record"):
            assert 0 < int(redis_server.command("PTTL", key)[1:]) <= 3600_000
    assert manager.metric('suspensions_total{result="done"}') == 1
    assert manager.metric('resumptions_total{result="new"}') == 1
    assert manager.metric("suspended_bytes_total") == len(DATA) + len(written)
    assert other.metric("resumed_bytes_total") == len(DATA)


async def test_of_turns_at_once_exactly_one_gets_the_session(manager, start_manager, redis_server, connect):
    other = start_manager(store_url=redis_server.url)
    async with connect(manager) as one, connect(other) as two:
        await suspend(one, (await resume(one)).fence, PIECES)
        turns = await asyncio.gather(*(resume(stub) for stub in (one, two) * 5))
        assert [turn.code for turn in turns].count(grpc.StatusCode.OK) == 1
        assert [turn.code for turn in turns].count(ABORTED) == 9
        assert all("SESSION_CONFLICT" in reason(turn.error) for turn in turns if turn.error)
        (winner,) = (turn for turn in turns if not turn.error)
        assert winner.data == DATA
        await suspend(two, winner.fence, PIECES[:1])


async def test_a_turn_whose_lease_ran_out_cannot_write(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url, lease=1)
    async with connect(manager) as stub:
        lost = await resume(stub)
        assert (await resume(stub)).code is ABORTED
        await asyncio.sleep(1.1)
        taken = await resume(stub)
        assert taken.fence > lost.fence
        error = await refused(suspend(stub, lost.fence, PIECES))
        assert error.code() is ABORTED
        assert parts(redis_server) == []
        await suspend(stub, taken.fence, PIECES)
        # Nor can it afterwards, and its end takes nothing away.
        assert (await refused(suspend(stub, lost.fence, PIECES[:1]))).code() is ABORTED
        await release(stub, lost.fence)
        assert (await resume(stub)).data == DATA


async def test_renewing_holds_a_session_and_closing_it_lets_go(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url, lease=1)
    async with connect(manager) as stub:
        await suspend(stub, (await resume(stub)).fence, PIECES)
        turn = await resume(stub)
        session = await opened(stub, spec(fence=turn.fence))
        for _ in range(4):
            await stub.RenewSessions(cache_manager_pb2.RenewSessionsRequest(sessions=[session]), timeout=10)
            await asyncio.sleep(0.4)
            assert (await resume(stub)).code is ABORTED
        # A turn that ends without a new row leaves the one before.
        await release(stub, turn.fence)
        assert (await resume(stub)).data == DATA


async def test_a_session_is_opened_anew_for_every_turn(manager, connect):
    async with connect(manager) as stub:
        first = await resume(stub)
        session = await opened(stub, spec(fence=first.fence))
        await offload_segments(stub, session, (0, segment(session)))
        await suspend(stub, first.fence, PIECES)
        await release(stub, first.fence)
        second = await resume(stub)
        longer = await opened(stub, spec(fence=second.fence, prompt=2000))
        assert longer.grant.layer_slots[0] > session.grant.layer_slots[0]
        # The end of the turn before comes late.
        await release(stub, first.fence)
        found = (await stub.GetSession(cache_manager_pb2.GetSessionRequest(session_id="s1"), timeout=10)).session
        assert found.state == cache_manager_pb2.SESSION_STATE_OPEN
        assert found.spec.prompt_tokens == 2000
        assert found.segment_count == 1
        # A turn may go on with the grant that it had.
        longer.grant.CopyFrom(session.grant)
        await stub.RenewSessions(cache_manager_pb2.RenewSessionsRequest(sessions=[longer]), timeout=10)
        found = (await stub.GetSession(cache_manager_pb2.GetSessionRequest(session_id="s1"), timeout=10)).session
        assert found.spec.grant == session.grant
        assert found.suspended.step == 3
        assert found.suspended.size_bytes > len(DATA)
        manager.kill()
        manager.restart()
        await asyncio.to_thread(wait_for, lambda: manager.metric("store_up") == 1, "the store")
        call = stub.GetSession(cache_manager_pb2.GetSessionRequest(session_id="s1"), timeout=10, wait_for_ready=True)
        found = (await call).session
        assert (found.suspended.step, found.segment_count) == (3, 1)


@pytest.mark.parametrize("damage", ["bit", "truncated", "foreign", "missing", "record"])
async def test_a_row_that_is_not_whole_is_not_given_out(manager, redis_server, connect, damage):
    async with connect(manager) as stub:
        await suspend(stub, (await resume(stub)).fence, PIECES)
        foreign = [bytes(reversed(piece)) for piece in PIECES]
        await suspend(stub, (await resume(stub, session_id="s2")).fence, foreign, session_id="s2")
        last = parts(redis_server)[1]
        assert last.startswith(OWNER)
        if damage == "bit":
            redis_server.command("SETRANGE", last, 1000, bytes([PIECES[1][1000] ^ 4]))
        elif damage == "truncated":
            redis_server.command("SET", last, PIECES[1][:60_000].tobytes())
        elif damage == "foreign":
            redis_server.command("COPY", parts(redis_server)[3], last, "REPLACE")
        elif damage == "missing":
            redis_server.command("DEL", last)
        else:
            redis_server.command("SETRANGE", f"{OWNER}:record", 40, b"\xff\xff")
        turn = await resume(stub)
        assert turn.code is (NOT_FOUND if damage == "missing" else DATA_LOSS)
        assert ("MISSING_PART" if damage == "missing" else "CORRUPT_ROW") in reason(turn.error)
        assert len(turn.data) < len(DATA)
        # The turn holds its session all the same, and leaves a whole row.
        await suspend(stub, turn.fence, PIECES)
        assert (await resume(stub)).data == DATA
        assert (await resume(stub, session_id="s2")).data == b"".join(foreign)
    results = {name: manager.metric(f'resumptions_total{{result="{name}"}}') for name in ("corrupt", "missing")}
    assert results == {"corrupt": damage != "missing", "missing": damage == "missing"}


async def test_a_row_of_something_else_is_not_given_out(manager, redis_server, connect):
    others = {
        "model": {"model": model(fingerprint="e" * 64)},
        "tokenizer": {"model": model(tokenizer_fingerprint="e" * 64)},
        "dtype": {"model": model(dtype="bfloat16")},
        "policy": {"policy": budget_pb2.Policy(name="h2o", parameters={"chunk": 7})},
        "budget": {"budget": budget_pb2.Budget(tokens=77)},
        "resident_codec": {"resident_codec": "int4"},
    }
    async with connect(manager) as stub:
        await suspend(stub, (await resume(stub)).fence, PIECES)
        for name, changes in others.items():
            turn = await resume(stub, **changes)
            assert (turn.code, turn.data) == (FAILED_PRECONDITION, b"")
            assert name in turn.error.details()
            assert "MISMATCH" in reason(turn.error)
            await release(stub, turn.fence)
        # As whoever can write to the store might leave it: another tenant's, or another session's.
        for changes in ({"tenant": "another"}, {"session_id": "s2"}):
            foreign = manifest_for(asked(), PIECES, **changes)
            redis_server.command("SET", f"{OWNER}:record", Record(1, 1, manifest=foreign.pack()).pack())
            turn = await resume(stub)
            assert (turn.code, turn.data) == (FAILED_PRECONDITION, b"")
            assert next(iter(changes)) in turn.error.details()
            await release(stub, turn.fence)


async def test_a_store_killed_between_parts_and_record(start_manager, tmp_path, connect):
    server = RedisProcess(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    server.start()
    try:
        manager = start_manager(store_url=server.url, lease=1)
        async with connect(manager) as stub:
            turn = await resume(stub)
            go_on = asyncio.Event()

            async def messages():
                for message in suspend_messages(turn.fence, PIECES):
                    yield message
                await go_on.wait()

            call = stub.SuspendSession(messages(), timeout=30)
            await asyncio.to_thread(wait_for, lambda: len(parts(server)) == 2, "the parts")
            server.kill()
            go_on.set()
            assert (await refused(call)).code() is UNAVAILABLE
            server.start()
            # The parts survived, but nothing names them, and they go by themselves.
            assert len(parts(server)) == 2
            for key in parts(server):
                assert 0 < int(server.command("PTTL", key)[1:]) <= UNLISTED_SECONDS * 1000
            await asyncio.sleep(1.1)
            again = await resume(stub)
            while again.code is UNAVAILABLE:  # The circuit closes with its next probe.
                await asyncio.sleep(0.1)
                again = await resume(stub)
            assert (again.code, again.manifest) == (NOT_FOUND, b"")
            await suspend(stub, again.fence, PIECES)
            assert (await resume(stub)).data == DATA
    finally:
        server.stop()


async def test_a_store_that_was_emptied_or_paused(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url, store_timeout=0.3)
    async with connect(manager) as stub:
        await suspend(stub, (await resume(stub)).fence, PIECES)
        running = await resume(stub, session_id="s2")
        redis_server.kill()
        redis_server.start()

        async def answered(**changes):
            while (turn := await resume(stub, **changes)).code is UNAVAILABLE:
                await asyncio.sleep(0.1)
            return turn

        turn = await answered()
        assert (turn.code, turn.manifest) == (NOT_FOUND, b"")
        # A turn that began before cannot tell whether its session was taken meanwhile.
        assert (await refused(suspend(stub, running.fence, PIECES, session_id="s2"))).code() is ABORTED
        redis_server.pause()
        assert (await resume(stub, session_id="s3")).code is UNAVAILABLE
        assert (await refused(suspend(stub, turn.fence, PIECES))).code() is UNAVAILABLE
        redis_server.resume()
        assert (await answered(session_id="s3")).code is NOT_FOUND
        await suspend(stub, turn.fence, PIECES)
        assert (await resume(stub)).data == DATA


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_a_store_that_is_full(start_manager, tmp_path, connect, policy):
    """It refuses to write, or drops what was used least lately; a row is given out whole or not at all."""
    server = RedisProcess(tmp_path, "--maxmemory", "14mb", "--maxmemory-policy", policy)
    server.start()
    try:
        manager = start_manager(store_url=server.url, store_high_bytes=1 << 40, janitor_interval=0.2)
        async with connect(manager) as stub:
            kept, tried = {}, 0
            for number in range(5):
                name, pieces = f"s{number}", [bytes([number]) * len(piece) for piece in PIECES]
                turn = await resume(stub, session_id=name)
                if turn.code is UNAVAILABLE:  # Not even its lease found room.
                    continue
                tried += 1
                try:
                    await suspend(stub, turn.fence, pieces, session_id=name)
                    kept[name] = b"".join(pieces)
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (UNAVAILABLE, ABORTED)  # noqa: PT017 - some are stored, and some are not.
            assert kept
            turns = {name: await resume(stub, session_id=name) for name in kept}
            # A store that is full to the brim has no room for a lease either.
            assert {turn.code for turn in turns.values()} <= {grpc.StatusCode.OK, NOT_FOUND, DATA_LOSS, UNAVAILABLE}
            whole = {name: turn.data for name, turn in turns.items() if turn.code is grpc.StatusCode.OK}
            assert whole.items() <= kept.items()
            assert len(whole) < 5
            broken = [name for name, turn in turns.items() if turn.code is DATA_LOSS]
            assert manager.metric('evicted_objects_total{kind="row",reason="broken"}') >= len(broken)
            if policy == "noeviction":
                assert {turn.code for turn in turns.values()} <= {grpc.StatusCode.OK, UNAVAILABLE}
                assert manager.metric('suspensions_total{result="store_full"}') == tried - len(kept)
                assert manager.metric('store_errors_total{reason="full"}') >= 5 - len(kept)
                assert manager.metric('store_errors_total{reason="unreachable"}') == 0
            intact = {name for name, turn in turns.items() if turn.code in (grpc.StatusCode.OK, UNAVAILABLE)}
            # Nothing is left of what is not whole, not even a part that could be written.
            await asyncio.to_thread(wait_for, lambda: stored(server) == intact, "the rest to be deleted")
    finally:
        server.stop()


async def test_streams_that_are_not_a_row_leave_nothing(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url, max_suspended_bytes=6 << 20, stream_timeout=0.5)
    async with connect(manager) as stub:
        turn = await resume(stub)
        good = suspend_messages(turn.fence, PIECES)
        large = [b"x" * PART_BYTES] * 2
        request = suspension_pb2.SuspendSessionRequest
        other = manifest_for(asked(session_id="s2"), PIECES).pack()
        wrong = {
            "nothing": ([], INVALID),
            "no header": (good[1:2], INVALID),
            "no fence": (suspend_messages(0, [], manifest=good[0].header.manifest), INVALID),
            "no manifest": (suspend_messages(turn.fence, [], manifest=b"manifest"), DATA_LOSS),
            "another session's": (suspend_messages(turn.fence, [], manifest=other), FAILED_PRECONDITION),
            "too large": (suspend_messages(turn.fence, large)[:1], INVALID),
            "two headers": ([good[0], good[0]], INVALID),
            "empty chunk": ([good[0], request(chunk=b"")], INVALID),
            "of two parts": ([*good[:4], request(chunk=b"x" * (1 << 20))], INVALID),
            "wrong bytes": ([good[0], *good[1:2] * 3], INVALID),
            "too few": (good[:-1], INVALID),
            "too many": ([*good, good[-1]], INVALID),
        }
        for name, (messages, code) in wrong.items():
            # Whoever goes on writing is told what was wrong all the same.
            more = [] if name in ("nothing", "too few") else [good[1]] * 8
            for sent in (messages, [*messages, *more]):
                error = await refused(stub.SuspendSession(iter(sent), timeout=30))
                assert error.code() is code, (name, error.details())

        async def stalling():
            yield good[0]
            await asyncio.sleep(5)

        assert (await refused(stub.SuspendSession(stalling(), timeout=30))).code() is UNAVAILABLE
        await asyncio.to_thread(wait_for, lambda: not parts(redis_server), "the parts to be deleted")
        flipped = [PIECES[0], bytes([PIECES[1][0] ^ 1]) + bytes(PIECES[1][1:])]
        broken = suspend_messages(turn.fence, flipped, manifest=manifest_for(asked(), PIECES).pack())
        assert (await refused(stub.SuspendSession(iter(broken), timeout=30))).code() is DATA_LOSS
        for bad in ("", "A/b", "x" * 65):
            assert (await resume(stub, session_id=bad)).code is INVALID
        await suspend(stub, turn.fence, PIECES)


async def test_nothing_is_left_of_a_deleted_session(manager, redis_server, connect):
    async with connect(manager) as stub:
        turn = await resume(stub)
        session = await opened(stub, spec(fence=turn.fence))
        await offload_segments(stub, session, (0, segment(session)))
        await suspend(stub, turn.fence, PIECES)
        running = await resume(stub)
        request = suspension_pb2.DeleteSessionRequest(session_id="s1")
        assert (await stub.DeleteSession(request, timeout=10)).deleted == 5
        assert redis_server.holds_nothing()
        assert (await refused(suspend(stub, running.fence, PIECES))).code() is ABORTED
        assert redis_server.holds_nothing()
        assert (await stub.DeleteSession(request, timeout=10)).deleted == 0
        assert (await resume(stub)).code is NOT_FOUND
    assert manager.metric("store_bytes") == 0
