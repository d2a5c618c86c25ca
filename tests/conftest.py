"""Real services for all tests. A program that is missing fails the test; nothing is skipped."""

import os
from contextlib import asynccontextmanager

import grpc
import pytest
from support.processes import ManagerProcess, RedisProcess

from scissorhands.v1 import cache_manager_pb2_grpc

# Small models gain nothing from threads, and tests that share a machine lose much by them. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels are interpreted: there need be no GPU. Read when they are imported.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def redis_server(tmp_path):
    """Return a real Redis that can be killed, paused and started again on the same port."""
    server = RedisProcess(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_manager():
    """Return a function that starts managers; they are stopped at the end."""
    started = []

    def start(**options):
        manager = ManagerProcess(**options)
        started.append(manager)
        return manager

    yield start
    for manager in started:
        manager.stop()


@pytest.fixture
def connect():
    """Return a function that opens a connection to a manager, with gRPC's own default limits."""

    @asynccontextmanager
    async def connected(manager):
        async with grpc.aio.insecure_channel(manager.address) as channel:
            yield cache_manager_pb2_grpc.CacheManagerServiceStub(channel)

    return connected
