"""A worker and a manager under budgets by head."""

from dataclasses import replace

import grpc
import pytest
from support.manager_data import fetch
from support.processes import ManagerProcess
from support.tiny_models import random_tokens
from support.tiny_worker import ask, request, tiny_loaded

from scissorhands.profile import Profile
from scissorhands.segment import check_segment
from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc

PROMPT = random_tokens(90, seed=5)
NEW, SLOTS = 60, 64
# The first head loses most by eviction.
PROFILE = Profile("", (0.1, 0.5), (((9.0, 3.0), (0.1, 0.01)), ((0.2, 0.01), (0.1, 0.02))))


# With these numbers no head can do with fewer than SLOTS, so all get as much.
EVEN = {"recent": 8, "lookahead": 8, "drop": 8, "chunk": 52}
UNEVEN: dict[str, int] = {}


async def serve(
    profile: Profile | None, numbers: dict[str, int], **given: object
) -> tuple[list[int], list[int], object, str]:
    """Return a greedy answer's tokens, the budgets, what the cache did, and the session."""
    message = request(PROMPT.tolist(), slots=SLOTS, new=NEW)
    message.policy.name = "scissorhands"
    message.policy.parameters.update(numbers)
    accepted, tokens, finish = await ask(message, replace(tiny_loaded(), profile=profile), **given)
    assert accepted.grant.by_head == (profile is not None)
    return tokens, list(accepted.grant.layer_slots), finish.cache, accepted.session_id


@pytest.mark.parametrize("numbers", [EVEN, UNEVEN], ids=["even", "uneven"])
async def test_plans_and_segments_by_head(numbers):
    alone, budgets, local, _ = await serve(PROFILE, numbers)
    if numbers is EVEN:
        whole, layers, cache, _ = await serve(None, numbers)
        assert (budgets, alone) == (layers * 2, whole)
        assert (local.evictions, local.evicted_slots) == (cache.evictions, cache.evicted_slots)
        assert local.allocated_bytes == cache.allocated_bytes
        assert local.mass_dropped == pytest.approx(cache.mass_dropped, rel=1e-4)
    else:
        assert budgets[0] > SLOTS > min(budgets)
    with ManagerProcess() as manager:
        tokens, granted, cache, session_id = await serve(PROFILE, numbers, manager=manager.address)
        assert (tokens, granted) == (alone, budgets)
        assert cache.plans_manager > 0
        assert cache.segments == cache.evictions > 3
        async with grpc.aio.insecure_channel(manager.address) as channel:
            stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
            found = await fetch(stub, session_id)
            section = await fetch(stub, session_id, epochs=[0], sections=[(1, 1)])
            session = (await stub.GetSession(cache_manager_pb2.GetSessionRequest(session_id=session_id))).session
    headers = [check_segment(data) for data in found.values()]
    assert {(header.layers, header.kv_heads) for header in headers} == {(2, 2)}
    assert sum(header.slots for header in headers) == cache.evicted_slots
    # The ledger learns of an eviction with a plan that it is asked for; on a busy machine the last ones are local.
    assert 0 < session.evicted_slots <= cache.evicted_slots
    place = headers[0].section(1, 1)
    assert section[0, 1, 1] == found[0][place.offset : place.offset + place.size]
    assert 0 < session.mass_dropped < 1
    assert len(session.persistence) in (0, 2)


async def test_a_grant_of_other_sizes_is_refused():
    with ManagerProcess() as manager:
        _, _, _, session_id = await serve(PROFILE, UNEVEN, manager=manager.address)
        async with grpc.aio.insecure_channel(manager.address) as channel:
            stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
            asked = cache_manager_pb2.GetSessionRequest(session_id=session_id)
            spec = (await stub.GetSession(asked)).session.spec
            spec.grant.by_head = False
            header = cache_manager_pb2.SnapshotHeader(session=spec, step=90, layer_lengths=[64] * 4)
            part = cache_manager_pb2.SnapshotPart(header=header)
            request = cache_manager_pb2.PlanEvictionsRequest(parts=[part])
            (result,) = (await stub.PlanEvictions(iter([request]), timeout=10)).results
            assert "must be 2 numbers, one a layer; got 4" in result.failure.message
