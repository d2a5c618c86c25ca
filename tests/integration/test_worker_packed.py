"""A worker and a manager whose slots are resident packed."""

from dataclasses import replace
from typing import NamedTuple

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.codec_data import statistics
from support.manager_data import fetch
from support.processes import ManagerProcess
from support.tiny_models import random_tokens
from support.tiny_worker import ask, collect, request, settings, tiny_loaded

from scissorhands.budget import BudgetRequest, Grant
from scissorhands.codec import codec_version
from scissorhands.errors import ConfigurationError
from scissorhands.formats import parse
from scissorhands.grant import PolicyRequest, codecs_text, grant
from scissorhands.profile import KEY_BITS, VALUE_BITS, Profile
from scissorhands.segment import check_segment
from scissorhands.v1 import budget_pb2, cache_manager_pb2, cache_manager_pb2_grpc, generation_pb2, generation_pb2_grpc
from scissorhands.wire import model_shape, read_grant
from scissorhands_server.worker import engine
from scissorhands_server.worker.accounting import show_cache
from scissorhands_server.worker.loading import LoadedModel
from scissorhands_server.worker.server import Worker

PROMPT = random_tokens(90, seed=5).tolist()
NEW = 60
HEAD_DIM, HEADS = 8, 4
COMPRESSION = 4.0
_LOSSES = tuple(2.0 ** -(4 * bits) for bits in (*KEY_BITS, *VALUE_BITS))
# The first head loses most, by eviction and by fewer bits.
PROFILE = Profile(
    "",
    (0.1, 0.5),
    (((9.0, 3.0), (0.1, 0.01)), ((0.2, 0.01), (0.1, 0.02))),
    ((tuple(1e4 * loss for loss in _LOSSES), _LOSSES), (_LOSSES, _LOSSES)),
)


def calibrated() -> LoadedModel:
    """Return the tiny model with a profile and statistics."""
    return replace(tiny_loaded(), profile=PROFILE, statistics=statistics(HEAD_DIM, HEADS))


class Served(NamedTuple):
    """What became of a request."""

    tokens: list[int]
    granted: Grant
    source: int
    cache: generation_pb2.CacheStatistics
    session_id: str


async def serve(codec: str, policy: str, loaded: LoadedModel, **given: object) -> Served:
    message = request(PROMPT, policy=policy, new=NEW, resident_codec=codec)
    message.budget.compression = COMPRESSION
    accepted, tokens, finish = await ask(message, loaded, **given)
    granted = accepted.grant
    return Served(tokens, read_grant(granted), granted.source, finish.cache, accepted.session_id)


@pytest.fixture
def held(monkeypatch):
    """Return what a worker's cache holds at every turn: allocated and packed bytes, on storages and in its metrics."""
    seen = set()

    def shown(cache, metrics):
        show_cache(cache, metrics)
        gauges = [gauge.collect()[0].samples[0].value for gauge in (metrics.allocated, metrics.packed)]
        seen.update({(cache.allocated_bytes(), cache.packed_bytes()), tuple(gauges)})

    monkeypatch.setattr(engine, "show_cache", shown)
    return seen


@pytest.fixture(scope="module")
def manager():
    with ManagerProcess() as process:
        yield process


@pytest.mark.parametrize(
    ("codec", "policy"), [("int4", "h2o"), ("turboquant:k4v3", "h2o"), ("planned", "scissorhands")]
)
async def test_packed_slots_are_granted_held_and_stored_as_asked(manager, held, codec, policy):
    loaded = calibrated()
    shape, total = model_shape(loaded.info), len(PROMPT) + NEW
    local = grant(BudgetRequest.compression(COMPRESSION), PolicyRequest(policy), shape, total, PROFILE, codec)
    served = await serve(codec, policy, loaded, manager=manager.address)
    assert (served.granted, served.source) == (local, budget_pb2.GRANT_SOURCE_MANAGER)
    assert len(set(local.codecs)) > 1 or codec != "planned"

    # The bytes are those of the storages, in the final message and in the metrics, and the compression is kept.
    cache = served.cache
    each = [parse(name).slot_bytes(HEAD_DIM, 4) for name in local.codecs]
    heads = 1 if local.by_head else shape.kv_heads
    packed = sum(slots * heads * size for slots, size in zip(local.layer_slots, each, strict=True))
    assert held == {(local.bytes, packed), (0, 0)}
    assert cache.allocated_bytes == local.bytes
    assert cache.full_16bit_bytes / cache.allocated_bytes >= COMPRESSION

    # Segments hold the packed rows as they were, beside a position of four bytes a slot.
    assert cache.segments == cache.evictions > 3
    async with grpc.aio.insecure_channel(manager.address) as channel:
        found = await fetch(cache_manager_pb2_grpc.CacheManagerServiceStub(channel), served.session_id)
    headers = [check_segment(data) for data in found.values()]
    assert sum(header.slots for header in headers) == cache.evicted_slots
    for header in headers:
        assert header.identity.codec == codecs_text(local)
        assert header.identity.codec_version == codec_version(local.codecs[0], loaded.statistics)
        sizes = each if local.by_head else [size for size in each for _ in range(shape.kv_heads)]
        for section, size in zip(header.sections, sizes, strict=True):
            assert section.size == section.slots * (4 + size)

    alone = await serve(codec, policy, loaded)
    assert (alone.tokens, alone.granted, alone.source) == (served.tokens, local, budget_pb2.GRANT_SOURCE_LOCAL)


async def refusal(message: generation_pb2.GenerateRequest, loaded: LoadedModel) -> tuple[str, str]:
    """Return the field that a request is refused for, and why."""
    async with (
        Worker(settings(), loaded) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = rpc_status.from_call(caught.value).details
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in details)
    return bad.field_violations[0].field, caught.value.details()


@pytest.mark.parametrize(
    ("codec", "policy", "words"),
    [
        ("klt:k4v3", "h2o", "needs a model's statistics: run scissorhands calibrate"),
        ("planned", "scissorhands", "planned needs a model's profile"),
        ("kivi", "h2o", "its rows are not independent"),
        ("int3", "h2o", "unknown codec 'int3'"),
        ("int4", "merged:r-kv", "must be resident as they are"),
    ],
)
async def test_what_cannot_be_resident_is_refused(codec, policy, words):
    message = request(PROMPT, slots=64, policy=policy, resident_codec=codec)
    field, text = await refusal(message, tiny_loaded())
    assert field == "resident_codec"
    assert words in text


async def test_a_compression_out_of_reach_is_refused_by_its_name():
    message = request(PROMPT, policy="h2o", resident_codec="int4")
    message.budget.compression = 1000
    field, text = await refusal(message, tiny_loaded())
    assert field == "budget.compression"
    assert "the smallest is" in text


async def test_the_worker_has_a_default():
    served = await serve("", "h2o", tiny_loaded(), resident_codec="int8")
    assert set(served.granted.codecs) == {"int8"}
    exact = await serve("none", "h2o", tiny_loaded(), resident_codec="int8")
    assert exact.granted.codecs == ()


@pytest.mark.parametrize("codec", ["klt", "kivi", "planned", "nothing"])
async def test_a_default_that_cannot_be_held_ends_the_start(codec):
    with pytest.raises(ConfigurationError, match="resident_codec"):
        Worker(settings(resident_codec=codec), tiny_loaded())


async def test_a_grant_of_unknown_formats_is_refused(manager):
    served = await serve("int4", "h2o", tiny_loaded(), manager=manager.address)
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        asked = cache_manager_pb2.GetSessionRequest(session_id=served.session_id)
        spec = (await stub.GetSession(asked)).session.spec
        assert spec.resident_codec == "int4"
        spec.grant.resident_codecs[0] = "int3"
        header = cache_manager_pb2.SnapshotHeader(session=spec, step=90, layer_lengths=[40, 40])
        part = cache_manager_pb2.SnapshotPart(header=header)
        request = cache_manager_pb2.PlanEvictionsRequest(parts=[part])
        (result,) = (await stub.PlanEvictions(iter([request]), timeout=10)).results
        assert result.failure.field == "session.grant.resident_codecs"
        assert "unknown codec 'int3'" in result.failure.message
