"""``scissorhands top`` beside a worker and a manager that work."""

import asyncio

import pytest
from support.tiny_models import random_tokens
from support.tiny_worker import collect, metrics, request, tiny_worker

from scissorhands_server.top.look import Servers
from scissorhands_server.top.states import manager_state, worker_state


async def test_it_shows_what_was_done_between_two_looks(start_manager, redis_server):
    manager = start_manager(store_url=redis_server.url)
    message = request(random_tokens(60, seed=1).tolist(), slots=30, new=200)
    async with tiny_worker(manager=manager.address) as (worker, stub):
        workers = Servers([f"127.0.0.1:{worker.metrics_port}"], worker_state)
        managers = Servers([f"127.0.0.1:{manager.metrics_port}"], manager_state)
        for servers in (workers, managers):
            await asyncio.to_thread(servers.look)
        _, _, last = await collect(stub.Generate(message))
        (state,) = await asyncio.to_thread(workers.look)
        (planned,) = await asyncio.to_thread(managers.look)
        found = metrics(worker)
    cache = last.finish.cache
    # All of both rates is of this answer, so their ratios are exact.
    assert state.generated / state.read == pytest.approx(200 / 60)
    assert state.remote_share == pytest.approx(cache.plans_manager / (cache.plans_manager + cache.plans_local))
    assert state.manager_up
    assert state.rows == found["scissorhands_worker_rows"] == 0
    assert planned.plans > 0
    assert planned.plan_seconds > 0
    assert planned.store_up
