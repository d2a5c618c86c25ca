"""Shared prefixes through a real manager and a real Redis: parts first, the record last, one copy for all."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from support.prefix_data import BASE, load_request, manifest_of, store_messages

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant
from scissorhands.prefix import PrefixManifest, boundaries
from scissorhands.v1 import prefix_pb2
from scissorhands_server.manager.keeper import UNLISTED_SECONDS
from scissorhands_server.manager.stored_prefixes import StoredPrefixes, name_of
from scissorhands_server.store.redis import RedisStore

INVALID, MISMATCH = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
GRANT = grant(BudgetRequest.tokens(160), PolicyRequest("h2o"), ModelShape(2, 2, 8, 4), 600)


def places(ids=range(300), base=BASE):
    return boundaries(base, GRANT, ModelShape(2, 2, 8, 4), list(ids), 80)


PLACES = places()
GROWN, WHOLE = PLACES[:2], PLACES[2:]


def pieces_of(place):
    """Return the parts of a boundary: two that grew, and one of evidence."""
    return [bytes([place.step % 251]) * 5000, b"v" * 300], [b"e" * place.step]


async def store(stub, place, **changes):
    grown, evidence = pieces_of(place)
    manifest = replace(manifest_of(place, grown, evidence), **changes)
    return (await stub.StorePrefix(iter(store_messages(manifest, grown + evidence)), timeout=30)).stored_bytes


async def load(stub, asked):
    """Return the header of a prefix, where its boundaries lie, and its bytes."""
    header, data = None, b""
    async for message in stub.LoadPrefix(load_request(asked), timeout=30):
        data += message.chunk
        header = message.header if message.HasField("header") else header
    return header, [PrefixManifest.parse(manifest).step for manifest in header.manifests], data


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def keys(redis):
    found = redis.command("KEYS", "*").decode().split("\r\n")
    return sorted(line for line in found if line.startswith("scissorhands:{default/"))


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url, prefix_ttl=50)


async def test_the_longest_prefix_is_given_out(manager, start_manager, redis_server, connect):
    other = start_manager(store_url=redis_server.url)
    async with connect(manager) as one, connect(other) as two:
        assert (await load(one, PLACES))[1:] == ([], b"")
        for place in GROWN:
            grown, evidence = pieces_of(place)
            written = manifest_of(place, grown, evidence).pack()
            assert await store(one, place) == sum(map(len, grown + evidence)) + len(written)
        first, second = (pieces_of(place) for place in GROWN)
        # Of the last boundary alone the evidence is of use. It comes first, and what grew in the order of the layers.
        assert len(first[0]) == len(second[0]) == 2
        grown = [one[0][rank] for rank in range(2) for one in (first, second)]
        assert (await load(two, PLACES))[1:] == ([80, 160], b"".join([*second[1], *grown]))
        assert (await load(two, PLACES[:1]))[1:] == ([80], b"".join([*first[1], *first[0]]))
        await store(two, WHOLE[1])
        assert (await load(one, PLACES))[1] == [240]
        assert (await load(one, PLACES[:3]))[1] == [80, 160]
        # Of other tokens nothing is.
        assert (await load(one, places([9, *range(299)])))[1] == []
    assert manager.metric('prefix_loads_total{result="done"}') == 4
    assert manager.metric('prefix_stores_total{result="done"}') == 2


async def test_what_is_missing_in_between_ends_a_prefix(manager, redis_server, connect):
    async with connect(manager) as stub:
        for place in GROWN:
            await store(stub, place)
        for key in keys(redis_server):
            if GROWN[0].key.hex() in key:
                redis_server.command("DEL", key)
        assert (await load(stub, PLACES))[1] == []
        await store(stub, GROWN[0])
        assert (await load(stub, PLACES))[1] == [80, 160]


async def test_a_boundary_is_stored_once(manager, start_manager, redis_server, connect):
    other = start_manager(store_url=redis_server.url)
    async with connect(manager) as one, connect(other) as two:
        stored = await asyncio.gather(*(store(stub, GROWN[0]) for stub in (one, two) * 4))
        assert sorted(bool(size) for size in stored) == [False] * 7 + [True]
        # A record, three parts and their list: of those who came too late nothing is left.
        assert len(keys(redis_server)) == 5
        assert (await load(two, GROWN[:1]))[1] == [80]


async def test_use_makes_it_stay(manager, redis_server, connect):
    async with connect(manager) as stub:
        for place in GROWN:
            await store(stub, place)
        stored = keys(redis_server)
        for use in (load(stub, PLACES), store(stub, GROWN[0])):
            for key in stored:
                redis_server.command("PEXPIRE", key, "9000")
            await use
            left = {key: int(redis_server.command("PTTL", key)[1:]) for key in stored}
            used = [key for key in stored if GROWN[0].key.hex() in key]
            assert all(40_000 < left[key] <= 50_000 for key in used)


async def test_parts_without_a_record_are_nothing(manager, redis_server, connect):
    """As if its worker had been killed half way."""
    async with connect(manager) as stub:
        grown, evidence = pieces_of(GROWN[0])
        messages = store_messages(manifest_of(GROWN[0], grown, evidence), grown + evidence)
        going = asyncio.Event()

        async def stream():
            for message in messages[:-1]:
                yield message
            going.set()
            await asyncio.sleep(60)

        call = stub.StorePrefix(stream(), timeout=30)
        await asyncio.wait_for(going.wait(), 10)
        call.cancel()
        assert (await load(stub, GROWN))[1] == []
        for key in keys(redis_server):
            assert int(redis_server.command("PTTL", key)[1:]) <= UNLISTED_SECONDS * 1000
        assert await store(stub, GROWN[0]) > 0
        assert (await load(stub, GROWN))[1] == [80]


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "record", "exchanged"])
async def test_what_is_not_whole_is_deleted(manager, redis_server, connect, damage):
    async with connect(manager) as stub:
        for place in GROWN:
            await store(stub, place)
        own = [key for key in keys(redis_server) if GROWN[1].key.hex() in key]
        record = next(key for key in own if key.endswith(":record"))
        part = next(key for key in own if key.endswith(":0"))
        if damage == "bit":
            redis_server.command("SETRANGE", part, "7", b"x")
        elif damage == "truncated":
            redis_server.command("SETRANGE", part, "0", b"x" * 9000)
        elif damage == "missing":
            redis_server.command("DEL", part)
        elif damage == "record":
            redis_server.command("SETRANGE", record, "30", b"xyz")
        else:
            redis_server.command("COPY", record.replace(GROWN[1].key.hex(), GROWN[0].key.hex()), record, "REPLACE")
        if damage in ("record", "exchanged"):
            assert (await load(stub, PLACES))[1] == [80]
        else:
            code = grpc.StatusCode.NOT_FOUND if damage == "missing" else grpc.StatusCode.DATA_LOSS
            assert await refused(load(stub, PLACES)) is code
        assert [key for key in keys(redis_server) if GROWN[1].key.hex() in key] == []
        assert manager.metric("prefixes_broken_total") == 1
        await store(stub, GROWN[1])
        assert (await load(stub, PLACES))[1] == [80, 160]


async def test_what_was_asked_for_before_is_told(manager, connect):
    async with connect(manager) as stub:
        asked = [place.step for place in PLACES]
        assert asked == [80, 160, 200, 240, 280]
        assert (await load(stub, PLACES))[0].asked_before == 0
        assert (await load(stub, PLACES))[0].asked_before == 5
        assert (await load(stub, places([*range(210), *range(90)])))[0].asked_before == 3
        assert (await load(stub, places([9, *range(299)])))[0].asked_before == 0


async def test_calls_that_make_no_sense_are_refused(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url, max_suspended_bytes=10_000, stream_timeout=0.5)
    async with connect(manager) as stub:
        for bad in ([], [b"short"], [b"k" * 32] * 1025):
            request = prefix_pb2.LoadPrefixRequest(boundaries=[prefix_pb2.PrefixBoundary(key=key) for key in bad])
            assert await refused(stub.LoadPrefix(request, timeout=30).read()) is INVALID
        place = GROWN[0]
        grown, evidence = pieces_of(place)
        good = store_messages(manifest_of(place, grown, evidence), grown + evidence)
        large = [b"x" * 6000] * 2
        chunk = prefix_pb2.StorePrefixRequest(chunk=b"x")
        tenant = replace(place, identity=replace(place.identity, tenant="No Tenant"))
        for messages, code in (
            (good[1:], INVALID),
            (good[:-1], INVALID),
            ([*good, chunk], INVALID),
            ([good[0], chunk, *good[2:]], INVALID),
            ([good[0], good[2], good[1], good[3]], INVALID),
            (store_messages(manifest_of(place, large, []), large), INVALID),
            (store_messages(manifest_of(tenant, grown, evidence), grown + evidence), INVALID),
            ([good[0], prefix_pb2.StorePrefixRequest(chunk=b"y" * 5000), *good[2:]], grpc.StatusCode.DATA_LOSS),
            ([prefix_pb2.StorePrefixRequest(header=prefix_pb2.StorePrefixHeader(manifest=b"x" * 90))],
             grpc.StatusCode.DATA_LOSS),
        ):  # fmt: skip
            assert await refused(stub.StorePrefix(iter(messages), timeout=30)) is code
        assert keys(redis_server) == []
        assert await store(stub, place) > 0


async def test_a_store_that_is_away(start_manager, redis_server, connect):
    manager = start_manager(store_url=redis_server.url, store_timeout=0.3)
    async with connect(manager) as stub:
        await store(stub, GROWN[0])
        redis_server.pause()
        assert await refused(load(stub, PLACES)) is grpc.StatusCode.UNAVAILABLE
        assert await refused(store(stub, GROWN[1])) is grpc.StatusCode.UNAVAILABLE
        redis_server.resume()


async def test_tenants_are_apart(redis_server):
    store_ = RedisStore(redis_server.url, 2, 4)
    try:
        stored = StoredPrefixes(store_, 50)
        (place, *_) = places(base=replace(BASE, tenant="ours"))
        grown, evidence = pieces_of(place)
        ours, theirs = name_of("ours", place.key), name_of("theirs", place.key)
        written, writer = manifest_of(place, grown, evidence).pack(), stored.new_writer()
        for index, piece in enumerate(grown + evidence):
            await stored.put(ours, writer, index, piece)
        assert await stored.commit(ours, writer, written, 3)
        assert (await stored.find(ours)).manifest.step == 80
        assert await stored.find(theirs) is None
        # Nor is the key of another tenant the same.
        assert place.key not in {other.key for other in places(base=replace(BASE, tenant="theirs"))}
    finally:
        await store_.close()
