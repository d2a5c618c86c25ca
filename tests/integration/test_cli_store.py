"""``scissorhands store`` and ``scissorhands sessions`` against a real manager and a real Redis."""

import asyncio
import json

import grpc
import pytest
from click.testing import CliRunner
from support.manager_data import offload, opened, segment, spec
from support.prefix_data import BASE, manifest_of, store_messages
from support.processes import wait_for
from support.stored_objects import keep, kept, keys, parts, release
from support.suspended_data import resume, suspend

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant
from scissorhands.prefix import boundaries
from scissorhands.v1 import suspension_pb2
from scissorhands_client import AsyncManagerClient, ManagerClient, SessionState
from scissorhands_client.commands.sessions import sessions
from scissorhands_client.commands.store import store

PIECES = [bytes(5000), bytes(3000)]
DATA = b"".join(PIECES)
SHAPE = ModelShape(2, 2, 8, 4)
GRANT = grant(BudgetRequest.tokens(160), PolicyRequest("h2o"), SHAPE, 600)
PLACE = boundaries(BASE, GRANT, SHAPE, [*range(100)], 80)[0]


@pytest.fixture
def manager(start_manager, redis_server):
    # The janitor sleeps, so that only commands mend.
    return start_manager(store_url=redis_server.url, janitor_interval=3600, lease=1)


async def run(manager, group, *arguments):
    """Run a command away from the event loop, and return its result."""
    words = [*arguments, "--manager", manager.address]
    return await asyncio.to_thread(CliRunner().invoke, group, words, env={"COLUMNS": "150"})


async def run_json(manager, group, *arguments, status=0):
    result = await run(manager, group, *arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


async def store_some(stub):
    """Store a session with a row and an archive, one with a row, one with an archive, and a prefix."""
    turn = await resume(stub, session_id="both")
    session = await opened(stub, spec("both", fence=turn.fence))
    await offload(stub, session, *((epoch, segment(session, epoch)) for epoch in range(3)))
    await suspend(stub, turn.fence, PIECES, session_id="both")
    await release(stub, turn.fence, "both")
    await keep(stub, "row", PIECES)
    session = await opened(stub, spec("archive"))
    await offload(stub, session, (0, segment(session)))
    manifest = manifest_of(PLACE, [b"g" * 500], [b"e" * 50])
    await stub.StorePrefix(iter(store_messages(manifest, [b"g" * 500, b"e" * 50])), timeout=30)


def dump(redis):
    """Return the value of every key of ours but lists, from which whoever reads one takes names that are gone."""
    return {key: redis.command("DUMP", key) for key in keys(redis) if not key.endswith(":index")}


def flip(redis, key, at):
    """Flip one bit of a byte, counted from the end."""
    at = int(redis.command("STRLEN", key)[1:]) - at
    (byte,) = redis.command("GETRANGE", key, str(at), str(at))[4:5]
    redis.command("SETRANGE", key, str(at), bytes([byte ^ 4]))


async def test_stat_tells_what_is_stored_and_what_bounds_it(start_manager, redis_server, connect):
    manager = start_manager(
        store_url=redis_server.url, tenant_quota_bytes=1 << 20, store_high_bytes=1 << 30, store_low_share=0.8
    )
    async with connect(manager) as stub:
        await store_some(stub)
        state = await run_json(manager, store, "stat")
        totals = {each["kind"]: (each["tenant"], each["objects"]) for each in state["totals"]}
        assert totals == {"row": ("default", 2), "archive": ("default", 2), "prefix": ("default", 1)}
        assert all(each["size_bytes"] > 300 * each["objects"] for each in state["totals"])
        assert (state["quota_bytes"], state["high_bytes"], state["low_share"]) == (1 << 20, 1 << 30, 0.8)
        assert state["used_memory_bytes"] > 500_000
        assert (state["most_memory_bytes"], state["memory_policy"]) == (None, "noeviction")
        assert state["key_hits"] > 0
        shown = (await run(manager, store, "stat")).stdout
        for text in ("archive", "1.0 MB, then down to 80% of it", "no bound"):
            assert text in shown
        async with AsyncManagerClient(manager.address) as client:
            assert (await client.get_store()).totals[0].tenant == "default"


async def test_verify_finds_a_bit_that_was_flipped(manager, redis_server, connect):
    async with connect(manager) as stub:
        await store_some(stub)
        whole = await run_json(manager, store, "verify")
        assert (whole["objects"], whole["bad"]) == (5, [])
        assert whole["size_bytes"] > 2 * len(DATA)
        segment_key = next(key for key in keys(redis_server) if "{default/both}:segment:1" in key)
        prefix_key = next(key for key in keys(redis_server) if "{default/prefix:" in key and key.endswith(":1"))
        row_key = next(key for key in parts(redis_server) if "{default/row}" in key)
        redis_server.command(
            "SETBIT", segment_key, str(8 * int(redis_server.command("STRLEN", segment_key)[1:]) - 3), "1"
        )
        redis_server.command(
            "SETBIT", segment_key, str(8 * int(redis_server.command("STRLEN", segment_key)[1:]) - 4), "1"
        )
        redis_server.command("SETBIT", prefix_key, "7", "0" if b"e"[0] & 1 else "1")
        redis_server.command("SETBIT", row_key, "999", "1")
        before = dump(redis_server)
        found = await run_json(manager, store, "verify", status=1)
        assert {(each["kind"], each["name"]) for each in found["bad"]} == {
            ("row", "row"),
            ("archive", "both"),
            ("prefix", PLACE.key.hex()),
        }
        assert {each["deleted"] for each in found["bad"]} == {False}
        assert dump(redis_server) == before
        result = await run(manager, store, "verify", "--delete")
        assert result.exit_code == 1
        assert "fails its checksum" in result.stdout
        assert "5 objects" in result.stdout
        assert "3 are not whole" in result.stdout
        assert (await run_json(manager, store, "verify"))["bad"] == []
        assert not set(keys(redis_server)) & {segment_key, prefix_key, row_key}
        assert (await resume(stub, session_id="both")).data == DATA
    assert manager.metric('evicted_objects_total{kind="row",reason="broken"}') == 1


async def test_gc_tells_what_it_does_and_a_dry_run_changes_nothing(manager, redis_server, connect):
    async with connect(manager) as stub:
        await store_some(stub)
        assert (await run_json(manager, store, "gc"))["items"] == []
        assert "nothing to do" in (await run(manager, store, "gc")).stdout
        await asyncio.sleep(1.1)  # The pins of what was just written.
        redis_server.command("SET", "scissorhands:{default/nobody}:suspended:77:0", b"x" * 100, "PX", "3000000")
        redis_server.command("DEL", "scissorhands:{default/archive}:segment:0")
        redis_server.command("DEL", next(key for key in parts(redis_server) if "{default/row}" in key))
        before = dump(redis_server)
        told = await run_json(manager, store, "gc", "--dry-run")
        assert dump(redis_server) == before
        things = {(each["what"], each["kind"], each["name"]) for each in told["items"]}
        assert things == {
            ("dead_page", "row", "nobody"),
            ("gone_object", "archive", "archive"),
            ("broken", "row", "row"),
        }
        assert "nothing was changed" in (await run(manager, store, "gc", "--dry-run")).stdout
        done = await run_json(manager, store, "gc")
        assert [each | {"size_bytes": 0} for each in done["items"]] == [
            each | {"size_bytes": 0} for each in told["items"]
        ]
        assert kept(redis_server) == {"both"}
        assert (await run_json(manager, store, "gc"))["items"] == []
        assert (await resume(stub, session_id="both")).data == DATA


async def test_gc_evicts_what_is_beyond_a_bound(start_manager, redis_server, connect):
    async with connect(start_manager(store_url=redis_server.url, janitor_interval=3600)) as stub:
        for number in range(6):
            await keep(stub, f"s{number}", [bytes(1 << 20)])
    small = start_manager(store_url=redis_server.url, janitor_interval=3600, tenant_quota_bytes=4 << 20)
    # Its first look at the store evicts already.
    await asyncio.to_thread(wait_for, lambda: len(kept(redis_server)) == 3, "the eviction")
    async with connect(start_manager(store_url=redis_server.url, janitor_interval=3600)) as stub:
        await keep(stub, "s6", [bytes(1 << 20)])
    told = await run_json(small, store, "gc", "--dry-run")
    assert [(each["what"], each["name"]) for each in told["items"]] == [("quota", "s3")]
    assert len(kept(redis_server)) == 4
    assert await run_json(small, store, "gc") == told | {"dry_run": False}
    assert kept(redis_server) == {"s4", "s5", "s6"}


async def test_sessions_are_listed_even_by_a_manager_that_never_saw_them(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url)
    async with connect(manager) as stub:
        await store_some(stub)
        running = await resume(stub, session_id="row")
        other = start_manager(store_url=redis_server.url)
        for asked, state in ((manager, "closed"), (other, "stored")):
            found = {each["session_id"]: each for each in await run_json(asked, sessions, "list")}
            assert set(found) == {"both", "row", "archive"}
            assert {each["kind"] for each in found["both"]["stored"]} == {"row", "archive"}
            assert [each["kind"] for each in found["row"]["stored"]] == ["row"]
            assert found["row"]["stored"][0]["pin_end_time"]
            assert found["row"]["stored"][0]["size_bytes"] > len(DATA)
            assert found["both"]["state"] == state
            assert bool(found["both"]["open_time"]) is (state == "closed")
        shown = (await run(other, sessions, "list")).stdout
        (line,) = (line for line in shown.splitlines() if line.split()[:1] == ["row"])
        assert "kB" in line
        assert "yes" in line
        with ManagerClient(other.address) as client:
            listed = [each.session_id for each in client.list_sessions(page_size=1)]
            assert sorted(listed) == ["archive", "both", "row"]
            assert {each.state for each in client.list_sessions(SessionState.STORED)} == {SessionState.STORED}
            assert list(client.list_sessions(SessionState.OPEN)) == []
        await release(stub, running.fence, "row")
        shown = (await run(other, sessions, "show", "both")).stdout
        assert "Stored row" in shown
        assert "Stored archive" in shown
        for name in ("both", "row", "archive"):
            assert (await run(other, sessions, "delete", name)).exit_code == 0
        # Prefixes are nobody's.
        assert all("{default/prefix:" in key or "{registry:default}" in key for key in keys(redis_server))
        assert "no sessions" in (await run(other, sessions, "list", "--state", "stored")).stdout


async def test_a_session_that_is_suspended_by_hand_has_no_turns_and_is_kept(start_manager, redis_server, connect):
    options = {"store_url": redis_server.url, "janitor_interval": 0.2, "tenant_quota_bytes": 3 << 20}
    manager, other = start_manager(**options, store_low_share=1), start_manager(**options, store_low_share=1)
    async with connect(manager) as stub, connect(other) as second:
        running = await resume(stub, session_id="s1")
        refused = await run(manager, sessions, "suspend", "s1")
        assert refused.exit_code == 1
        assert "a turn of session 's1' runs" in refused.output
        await suspend(stub, running.fence, [bytes(1 << 20)], session_id="s1")
        assert "suspended: 1.0 MB stay until" in (await run(manager, sessions, "suspend", "s1")).stdout
        turn = await resume(second, session_id="s1")
        assert turn.code is grpc.StatusCode.ABORTED
        assert "scissorhands sessions resume s1" in turn.error.details()
        assert "by hand" in (await run(other, sessions, "show", "s1")).stdout
        for number in range(2, 7):
            await keep(second, f"s{number}", [bytes(1 << 20)])
        assert "s1" in kept(redis_server)
        # Suspending it again changes nothing, and any manager lets it go on.
        assert (await run_json(other, sessions, "suspend", "s1"))["kind"] == "row"
        assert "all of it checked" in (await run(other, sessions, "resume", "s1")).stdout
        turn = await resume(stub, session_id="s1")
        assert turn.data == bytes(1 << 20)
        await release(stub, turn.fence, "s1")
        unknown = await run(manager, sessions, "suspend", "nobody")
        assert (unknown.exit_code, "nothing is stored" in unknown.output) == (1, True)
        # One that is not whole is told, and does not keep its session from going on.
        await run(manager, sessions, "suspend", "s1")
        flip(redis_server, next(key for key in parts(redis_server) if "{default/s1}" in key), 999)
        broken = await run(manager, sessions, "resume", "s1")
        assert (broken.exit_code, "fails its checksum" in broken.stdout) == (1, True)
        turn = await resume(stub, session_id="s1")
        assert turn.code is grpc.StatusCode.NOT_FOUND
        await suspend(stub, turn.fence, PIECES, session_id="s1")
        assert (await resume(stub, session_id="s1")).data == DATA
        await stub.DeleteSession(suspension_pb2.DeleteSessionRequest(session_id="s1"), timeout=10)
