"""A store without room costs a kept session its row, and nothing else: neither the answer nor the manager's plans."""

import pytest
from support.conversations import FIRST, ask, results, workers
from support.tiny_worker import metrics

from scissorhands.v1 import budget_pb2


async def test_a_row_above_the_quota_is_not_kept(start_manager, redis_server):
    manager = start_manager(store_url=redis_server.url, tenant_quota_bytes=1000)
    async with workers(manager, count=1) as ((worker, stub),):
        _, alone, _ = await ask(stub, FIRST)
        accepted, tokens, finish = await ask(stub, FIRST, session_id="s1")
        assert tokens == alone
        assert accepted.grant.source == budget_pb2.GRANT_SOURCE_MANAGER
        assert finish.cache.suspended_bytes == 0
        assert results(worker, "suspends") == {"quota": 1}
        accepted, _, _ = await ask(stub, FIRST + tokens + FIRST, session_id="s1")
        assert accepted.resumed_tokens == 0
        assert results(worker) == {"new": 2}
        assert metrics(worker)["scissorhands_worker_manager_up"] == 1


@pytest.mark.parametrize("already", [False, True])
async def test_a_full_store_is_no_manager_that_is_away(start_manager, redis_server, already):
    manager = start_manager(store_url=redis_server.url, store_high_bytes=1 << 40)
    async with workers(manager, count=1) as ((worker, stub),):
        _, alone, _ = await ask(stub, FIRST)
        if already:
            await ask(stub, FIRST, session_id="s1")
        # Less than the server itself takes.
        assert redis_server.command("CONFIG", "SET", "maxmemory", "100000") == b"+OK\r\n"
        for name in ("s1", "s2"):
            accepted, tokens, finish = await ask(stub, FIRST, session_id=name)
            assert tokens == alone
            assert accepted.grant.source == budget_pb2.GRANT_SOURCE_MANAGER
            assert finish.cache.suspended_bytes == 0
        assert results(worker).get("store_full") == 2
        assert metrics(worker)["scissorhands_worker_manager_up"] == 1
