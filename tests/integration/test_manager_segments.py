"""Segments through a manager into a real Redis and back."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.manager_data import fetch, model, offload, opened, segment, spec, upload

from scissorhands.segment import check_segment
from scissorhands.v1 import cache_manager_pb2

pb = cache_manager_pb2


@pytest.fixture
def manager(redis_server, start_manager):
    return start_manager(store_url=redis_server.url, max_segment_bytes=8 << 20)


async def told(stub, session_id):
    return (await stub.GetSession(pb.GetSessionRequest(session_id=session_id), timeout=10)).session


async def close(stub, session_id, *, discard=False):
    request = pb.CloseSessionRequest(session_id=session_id, discard_segments=discard)
    return (await stub.CloseSession(request, timeout=10)).session


async def failing(call):
    """Return the status code and the field of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status, bad, info = (
        rpc_status.from_call(caught.value),
        error_details_pb2.BadRequest(),
        error_details_pb2.ErrorInfo(),
    )
    if any(detail.Unpack(bad) for detail in status.details):
        return caught.value.code(), bad.field_violations[0].field
    assert any(detail.Unpack(info) for detail in status.details)
    return caught.value.code(), info.metadata.get("field")


async def test_segments_round_trip_whole_and_by_section(manager, redis_server, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        # The third has sections of more than a message, and the second none with anything in them.
        first, second = segment(session, 0), segment(session, 1, sizes=(0, 0, 0, 0))
        third = segment(session, 2, sizes=(3 << 20, 10, 1 << 20, 0))
        response = await offload(stub, session, (0, first), (1, second), (2, third))
        total = len(first) + len(second) + len(third)
        assert (response.stored, response.stored_bytes, list(response.refused)) == (3, total, [])
        assert redis_server.command("STRLEN", "scissorhands:{default/s1}:segment:2") == b":%d\r\n" % len(third)

        assert await fetch(stub, "s1") == {0: first, 1: second, 2: third}
        assert await fetch(stub, "s1", epochs=[2, 0]) == {2: third, 0: first}

        addresses = [(0, 0), (1, 1), (1, 0)]
        parts = await fetch(stub, "s1", epochs=[0, 2], sections=addresses)
        for epoch, data in ((0, first), (2, third)):
            parsed = check_segment(data)
            for layer, head in addresses:
                place = parsed.section(layer, head)
                assert parts[(epoch, layer, head)] == data[place.offset : place.offset + place.size]
        assert len(parts) == 6

        found = await told(stub, "s1")
        assert [(s.epoch, s.step, s.slots, s.size_bytes) for s in found.segments] == [
            (0, 100, 9, len(first)),
            (1, 101, 0, len(second)),
            (2, 102, (3 << 20) // 10 + 1 + (1 << 20) // 10, len(third)),
        ]
        assert (found.segment_count, found.segment_bytes) == (3, total)
        listed = (await stub.ListSessions(pb.ListSessionsRequest(), timeout=10)).sessions
        assert [(len(s.segments), s.segment_count, s.segment_bytes) for s in listed] == [(0, 3, total)]
        assert manager.metric("segments_stored_total") == 3
        assert manager.metric("segment_bytes_stored_total") == total
        assert manager.metric("store_bytes") == total


async def test_small_chunks_make_the_same_segment(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        data = segment(session)
        await offload(stub, session, (0, data), chunk=7)
        assert await fetch(stub, "s1") == {0: data}


async def test_a_segment_sent_twice_is_stored_once(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        data = segment(session)
        await offload(stub, session, (0, data), (0, data))
        assert manager.metric("store_bytes") == len(data)
        assert (await told(stub, "s1")).segment_count == 1


async def test_segments_of_several_sessions_share_a_stream(manager, connect):
    async with connect(manager) as stub:
        sessions = [await opened(stub, spec(name)) for name in ("a", "b")]
        datas = [segment(session) for session in sessions]
        messages = [m for session, data in zip(sessions, datas, strict=True) for m in upload(session, (0, data))]
        assert (await stub.OffloadSegments(iter(messages), timeout=30)).stored == 2
        assert [await fetch(stub, name) for name in ("a", "b")] == [{0: data} for data in datas]


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda session: flipped(segment(session), 3),
        lambda session: flipped(segment(session), 30),
        lambda session: flipped(segment(session), len(segment(session)) - 1),
        lambda session: segment(session)[:-1],
        lambda session: segment(session) + b"x",
        lambda session: b"x",
        lambda session: segment(session, identity={"session_id": "another"}),
        lambda session: segment(session, identity={"model": "0" * 64}),
        lambda session: segment(session, segment_epoch=5),
        lambda session: segment(session, shape=(1, 4, 8)),
        lambda session: segment(session, shape=(2, 2, 16)),
    ],
)
async def test_a_corrupt_or_foreign_segment_is_refused_and_the_next_is_stored(manager, connect, spoil):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        good = segment(session, 1)
        response = await offload(stub, session, (0, spoil(session)), (1, good))
        assert [(r.session_id, r.epoch, r.reason) for r in response.refused] == [("s1", 0, "corrupt")]
        assert response.stored == 1
        assert await fetch(stub, "s1") == {1: good}
        assert manager.metric('segments_refused_total{reason="corrupt"}') == 1


async def test_a_segment_that_is_too_large_is_read_past(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        large, good = segment(session, 0, sizes=(9 << 20, 0, 0, 0)), segment(session, 1)
        response = await offload(stub, session, (0, large), (1, good))
        assert [(r.epoch, r.reason) for r in response.refused] == [(0, "too_large")]
        assert await fetch(stub, "s1") == {1: good}


async def test_a_size_that_is_announced_is_not_believed(manager, connect):
    """A header that announces the most that fits takes no memory by itself."""
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        header = pb.SegmentHeader(session=session, epoch=0, size_bytes=2**64 - 1)
        messages = [pb.OffloadSegmentsRequest(header=header), *upload(session, (1, segment(session, 1)))]
        response = await stub.OffloadSegments(iter(messages), timeout=10)
        assert [(r.epoch, r.reason) for r in response.refused] == [(0, "too_large")]
        assert response.stored == 1


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda messages: messages.pop(0), "part"),
        (lambda messages: messages.pop(), "chunk"),
        (lambda messages: messages.append(messages[-1]), "part"),
        (lambda messages: messages.insert(1, messages[0]), "chunk"),
        (lambda messages: messages.insert(1, pb.OffloadSegmentsRequest()), "chunk"),
        (lambda messages: messages.insert(1, pb.OffloadSegmentsRequest(chunk=b"")), "chunk"),
        (lambda messages: messages.insert(1, pb.OffloadSegmentsRequest(chunk=bytes((1 << 20) + 1))), "chunk"),
        (lambda messages: messages.insert(1, pb.OffloadSegmentsRequest(chunk=bytes(1 << 20))), "chunk"),
        (lambda messages: setattr(messages[0].header, "size_bytes", 0), "header.size_bytes"),
        (lambda messages: messages[0].header.session.ClearField("grant"), "session.grant"),
        (lambda messages: setattr(messages[0].header.session, "session_id", "a}b"), "session.session_id"),
    ],
)
async def test_malformed_streams_are_refused_by_field_and_keep_what_was_whole(manager, connect, spoil, field):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        whole, good = segment(session), segment(session, 1)
        messages = upload(session, (0, whole), chunk=64)
        spoil(messages)
        call = stub.OffloadSegments(iter([*upload(session, (1, good)), *messages]), timeout=10)
        assert await failing(call) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        found = await fetch(stub, "s1")
        assert found.pop(1) == good
        assert found in ({}, {0: whole})


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"session_id": "nobody"}, (grpc.StatusCode.NOT_FOUND, "session_id")),
        ({"session_id": "no body"}, (grpc.StatusCode.INVALID_ARGUMENT, "session_id")),
        ({"session_id": "s1", "epochs": [7]}, (grpc.StatusCode.NOT_FOUND, "epochs")),
        (
            {"session_id": "s1", "sections": [pb.SectionAddress(layer=2)]},
            (grpc.StatusCode.INVALID_ARGUMENT, "sections"),
        ),
        (
            {"session_id": "s1", "sections": [pb.SectionAddress(kv_head=2)]},
            (grpc.StatusCode.INVALID_ARGUMENT, "sections"),
        ),
    ],
)
async def test_what_is_not_there_is_named(manager, connect, request_, expected):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        await offload(stub, session, (0, segment(session)))

        async def drain():
            async for _ in stub.FetchSegments(pb.FetchSegmentsRequest(**request_), timeout=10):
                pass

        assert await failing(drain()) == expected


@pytest.mark.parametrize("place", [10, 400, -1])
async def test_what_was_damaged_in_the_store_never_leaves_it(manager, redis_server, connect, place):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        data = segment(session)
        await offload(stub, session, (0, data))
        place %= len(data)
        redis_server.command("SETRANGE", "scissorhands:{default/s1}:segment:0", place, bytes([data[place] ^ 0xFF]))
        code, _ = await failing(fetch(stub, "s1"))
        assert code is grpc.StatusCode.DATA_LOSS


async def test_a_session_without_segments_has_nothing_to_fetch(manager, connect):
    async with connect(manager) as stub:
        await opened(stub, spec())
        assert await fetch(stub, "s1") == {}


async def test_closing_keeps_segments_and_discarding_deletes_them(manager, redis_server, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        data = segment(session)
        await offload(stub, session, (0, data))
        assert (await close(stub, "s1")).segment_count == 1
        assert await fetch(stub, "s1") == {0: data}
        assert manager.metric('sessions{state="closed"}') == 1
        assert (await close(stub, "s1", discard=True)).segment_count == 0
        assert redis_server.holds_nothing()
        assert manager.metric("store_bytes") == 0
        assert [manager.metric(f'sessions{{state="{state}"}}') for state in ("open", "closed", "expired")] == [0, 0, 0]
        # What comes after is not stored any more.
        response = await offload(stub, session, (1, segment(session, 1)))
        assert [r.reason for r in response.refused] == ["session_closed"]
        assert redis_server.holds_nothing()


async def test_a_late_segment_of_a_closed_session_is_stored(manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        await close(stub, "s1")
        data = segment(session)
        assert (await offload(stub, session, (0, data))).stored == 1
        assert await fetch(stub, "s1") == {0: data}
        assert (await told(stub, "s1")).state == pb.SESSION_STATE_CLOSED


async def test_segments_and_the_gauge_end_with_their_time(redis_server, start_manager, connect):
    manager = start_manager(store_url=redis_server.url, lease=1, segment_ttl=2, retention=1)
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        await offload(stub, session, (0, segment(session)))
        assert manager.metric("store_bytes") > 0
        while manager.metric("store_bytes") or manager.metric('sessions{state="expired"}'):
            await asyncio.sleep(0.1)
        while not redis_server.holds_nothing():
            await asyncio.sleep(0.1)


async def test_a_restarted_manager_finds_the_segments_again(manager, redis_server, start_manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        datas = {epoch: segment(session, epoch) for epoch in range(12)}
        await offload(stub, session, *datas.items())
        manager.kill()
        second = start_manager(store_url=redis_server.url)
    async with connect(second) as stub:
        # Nobody has told it of the session yet.
        assert await fetch(stub, "s1") == datas
        found = await told(stub, "s1")
        assert (found.state, found.spec.session_id) == (pb.SESSION_STATE_EXPIRED, "s1")
        assert [info.epoch for info in found.segments] == list(range(12))
        await stub.RenewSessions(pb.RenewSessionsRequest(sessions=[session]), timeout=10)
        found = await told(stub, "s1")
        assert (found.state, found.spec) == (pb.SESSION_STATE_OPEN, session)
        assert [info.size_bytes for info in found.segments] == [len(data) for data in datas.values()]
        assert second.metric("store_bytes") == sum(map(len, datas.values()))
        await close(stub, "s1", discard=True)
        assert redis_server.holds_nothing()
        assert second.metric("store_bytes") == 0


async def test_a_restarted_manager_discards_what_it_never_saw(manager, redis_server, start_manager, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        await offload(stub, session, (0, segment(session)))
        manager.kill()
    second = start_manager(store_url=redis_server.url)
    async with connect(second) as stub:
        await close(stub, "s1", discard=True)
        assert redis_server.holds_nothing()


async def test_segments_that_the_store_has_lost_are_forgotten(manager, redis_server, connect):
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        await offload(stub, session, (0, segment(session)), (1, segment(session, 1)))
        redis_server.command("DEL", "scissorhands:{default/s1}:segment:0")
        found = await told(stub, "s1")
        assert [info.epoch for info in found.segments] == [1]
        assert manager.metric("store_bytes") == len(segment(session, 1))


async def test_uploads_beyond_the_memory_bound_are_turned_away(redis_server, start_manager, connect):
    limits = {"max_segment_bytes": 1 << 20, "segment_memory_bytes": 1 << 20}
    manager = start_manager(store_url=redis_server.url, **limits)
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        data = segment(session, 0, sizes=(600_000, 0, 0, 0))
        messages = upload(session, (0, data), chunk=100_000)
        never = asyncio.Event()

        async def half():
            for message in messages[:3]:
                yield message
            await never.wait()

        holding = asyncio.ensure_future(stub.OffloadSegments(half(), timeout=60))
        other = segment(session, 1, sizes=(600_000, 0, 0, 0))

        async def attempt():
            try:
                return await offload(stub, session, (1, other))
            except grpc.aio.AioRpcError as error:
                return error.code()

        while (outcome := await attempt()) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert outcome.stored == 1
            await asyncio.sleep(0.01)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        while await attempt() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            await asyncio.sleep(0.01)


async def test_a_segment_with_a_large_header_is_read_in_two_steps(redis_server, start_manager, connect):
    manager = start_manager(store_url=redis_server.url)
    async with connect(manager) as stub:
        session = await opened(stub, spec(model=model(layers=400, kv_heads=16)))
        data = segment(session, 0, sizes=[16] * 6400)
        assert check_segment(data).sections[0].offset > 64 << 10
        assert (await offload(stub, session, (0, data))).stored == 1
        assert await fetch(stub, "s1") == {0: data}
        parts = await fetch(stub, "s1", sections=[(399, 15)])
        assert parts == {(0, 399, 15): data[-16:]}
