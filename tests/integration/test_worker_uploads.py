"""How segments and ends of sessions reach a manager that refuses, breaks off or is slow."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry
from support.waiting import SECONDS, until

from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc
from scissorhands_server.hosting import GrpcHost
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.uploader import BATCH_BYTES, Uploader

WAITING = "scissorhands_worker_segment_queue_bytes"


class Manager(cache_manager_pb2_grpc.CacheManagerServiceServicer):
    """Writes down the calls that it gets."""

    def __init__(self):
        self.calls = []

    async def OffloadSegments(self, requests, context):  # noqa: N802 - the protocol's name
        del context
        epochs = [message.header.epoch async for message in requests if message.HasField("header")]
        self.calls.append(epochs)
        return cache_manager_pb2.OffloadSegmentsResponse(stored=len(epochs))

    async def CloseSession(self, message, context):  # noqa: N802 - the protocol's name
        del context
        self.calls.append(message.session_id)
        return cache_manager_pb2.CloseSessionResponse()


@asynccontextmanager
async def uploader_to(manager: Manager, *sessions: str):
    """Connect an uploader that holds sessions to a scripted manager."""
    host = GrpcHost(["scissorhands.v1.CacheManagerService"])
    cache_manager_pb2_grpc.add_CacheManagerServiceServicer_to_server(manager, host.server)
    address = f"127.0.0.1:{host.bind('127.0.0.1', 0)}"
    await host.start()
    registry = CollectorRegistry()
    link = ManagerLink(address, WorkerMetrics(registry, "tiny", 1, 1), SECONDS)
    uploader = Uploader(link, asyncio.get_running_loop(), 8 * BATCH_BYTES)
    await link.start()
    for session in sessions:
        link.hold(cache_manager_pb2.SessionSpec(session_id=session))
    uploader.start()
    try:
        yield uploader, registry.get_sample_value
    finally:
        await uploader.stop(0)
        await link.stop()
        await host.stop(0)


async def test_ends_of_sessions_do_not_wait_for_each_other():
    sessions = [str(number) for number in range(20)]

    class Meeting(Manager):
        def __init__(self):
            super().__init__()
            self.all_here = asyncio.Event()

        async def CloseSession(self, message, context):  # noqa: N802 - the protocol's name
            response = await super().CloseSession(message, context)
            if len(self.calls) == len(sessions):
                self.all_here.set()
            await self.all_here.wait()
            return response

    manager = Meeting()
    async with uploader_to(manager, *sessions) as (uploader, _):
        for session in sessions:
            uploader.end(session, discard=True)
        await until(manager.all_here.is_set, "all ends")
    assert sorted(manager.calls) == sorted(sessions)


async def test_an_end_waits_for_the_segments_of_its_own_session_only():
    first_upload = asyncio.Event()
    go_on = asyncio.Event()

    class Slow(Manager):
        async def OffloadSegments(self, requests, context):  # noqa: N802 - the protocol's name
            first_upload.set()
            await go_on.wait()
            return await super().OffloadSegments(requests, context)

    manager = Slow()
    async with uploader_to(manager, "long", "gone") as (uploader, value):
        for epoch in range(3):
            assert uploader.stage("long", epoch, bytes(BATCH_BYTES - 1))
        uploader.end("long", discard=False)
        await asyncio.wait_for(first_upload.wait(), SECONDS)
        assert uploader.stage("gone", 7, b"segment")
        uploader.end("gone", discard=True)
        go_on.set()
        await until(lambda: "long" in manager.calls, "the last end")
        assert value(WAITING) == 0
    assert manager.calls == [[0], "gone", [1], [2], "long"]
    assert value("scissorhands_worker_segments_total", {"result": "offloaded"}) == 3
    assert value("scissorhands_worker_segments_total", {"result": "dropped"}) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
async def test_segments_and_ends_that_a_manager_refuses_for_a_while_are_not_lost(code):
    """INTERNAL is how grpc reports a connection that breaks while a message is being written."""
    refusing = True

    class Full(Manager):
        async def OffloadSegments(self, requests, context):  # noqa: N802 - the protocol's name
            if refusing:
                await context.abort(code, "busy")
            return await super().OffloadSegments(requests, context)

        async def CloseSession(self, message, context):  # noqa: N802 - the protocol's name
            if refusing and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                await context.abort(code, "busy")
            return await super().CloseSession(message, context)

    def free() -> None:
        nonlocal refusing
        refusing = False

    manager = Full()
    async with uploader_to(manager, "one", "two") as (uploader, value):
        asyncio.get_running_loop().call_later(0.2, free)
        assert uploader.stage("one", 0, b"segment")
        uploader.end("one", discard=False)
        uploader.end("two", discard=True)
        await until(lambda: {"one", "two"} <= {call for call in manager.calls if isinstance(call, str)}, "both ends")
        assert value(WAITING) == 0
    assert [0] in manager.calls
    assert value("scissorhands_worker_segments_total", {"result": "dropped"}) == 0
