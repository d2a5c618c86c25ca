"""How fast rows go to the store and come back through a manager, against a bare redis-py pipeline of the same bytes."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import grpc
from prometheus_client import Counter
from rich.progress import track

from scissorhands.suspended import Manifest, asked_identity, cut, describe
from scissorhands.v1 import budget_pb2, model_pb2, suspension_pb2
from scissorhands_server.row_messages import RowCalls, RowChunk, row_chunks
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.transfer import next_header

_TIMEOUT = 120.0
_SESSION = "row-transfer"


async def throughput(address: str, redis: Any, model: model_pb2.ModelInfo, size: int, rounds: int) -> dict[str, float]:
    """Return bytes a second of rows of ``size`` bytes, and of a bare pipeline; in turn, the medians of some rounds.

    A row is cut, described, sent, checked and written, and read, checked and received, as a worker and a manager do;
    nothing is computed meanwhile.
    """
    data = memoryview(bytearray(os.urandom(size)))
    names = [f"bare:{index}" for index in range(len(cut(data)))]

    async with grpc.aio.insecure_channel(address) as channel:
        calls = RowCalls(channel)
        asked = suspension_pb2.ResumeSessionRequest(
            session_id=_SESSION, model=model, policy=budget_pb2.Policy(name="full")
        )
        fence = await _claim(calls, asked)

        async def suspend() -> None:
            pieces = cut(data)
            parts = await asyncio.to_thread(describe, pieces)
            identity = replace(asked_identity(asked), codec_version="1", tokens="0")
            manifest = Manifest(identity, 1, 0, 1, (1,), b"", parts)
            await calls.suspend(_messages(fence, manifest.pack(), pieces), timeout=_TIMEOUT)

        async def resume() -> None:
            nonlocal fence
            call = calls.resume(asked, timeout=_TIMEOUT)
            header = await next_header(call)
            fence = header.fence
            memory = Memory(size, lambda _: None)
            memory.take(size)
            arrival = Arrival([size], memory)
            parts = ((0, part) for part in Manifest.parse(header.manifest).parts)
            await arrival.receive(call, parts, Counter("received", "Bytes.", registry=None))

        async def bare(command: Callable[[Any, str, memoryview], Any]) -> None:
            pipeline = redis.pipeline(transaction=False)
            for name, piece in zip(names, cut(data), strict=True):
                command(pipeline, name, piece)
            await pipeline.execute()

        # Written before it is read.
        cases: dict[str, Callable[[], Awaitable[None]]] = {
            "redis_set": lambda: bare(lambda pipeline, name, piece: pipeline.set(name, piece)),
            "suspend": suspend,
            "redis_get": lambda: bare(lambda pipeline, name, _: pipeline.get(name)),
            "resume": resume,
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in track(range(rounds), description="Rows to the store and back", transient=True):
            for name, work in cases.items():
                began = time.perf_counter()
                await work()
                seconds[name].append(time.perf_counter() - began)
    return {f"{name}_bytes_per_second": size / median(taken) for name, taken in seconds.items()}


async def _claim(calls: RowCalls, asked: suspension_pb2.ResumeSessionRequest) -> int:
    """Take the lease of a session that has no row; return its token."""
    call = calls.resume(asked, timeout=_TIMEOUT)
    header = await next_header(call)
    call.cancel()
    return int(header.fence)


def _messages(
    fence: int, manifest: bytes, pieces: Sequence[memoryview]
) -> Iterator[suspension_pb2.SuspendSessionRequest | RowChunk]:
    header = suspension_pb2.SuspendHeader(session_id=_SESSION, fence=fence, manifest=manifest)
    yield suspension_pb2.SuspendSessionRequest(header=header)
    for piece in pieces:
        yield from row_chunks(piece)
