"""What a manager answers to sketches that are malformed, and to sessions that have no segments."""

import grpc
import numpy as np
import pytest

from scissorhands.recall import HeadSketch
from scissorhands.recall_wire import sketch_messages
from scissorhands.v1 import recall_pb2

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 8}
HEAD = HeadSketch(np.ones((3, 8), np.float16), np.arange(5), 4)


@pytest.fixture
def manager(redis_server, start_manager):
    return start_manager(store_url=redis_server.url)


def header(**changes):
    return recall_pb2.RecallHeader(**{"session_id": "s1", "epoch": 3, **SHAPE, **changes})


async def answers(stub, messages):
    return [message async for message in stub.RecallSections(iter(messages), timeout=20)]


async def test_segments_that_are_not_stored_are_told(manager, connect):
    async with connect(manager) as stub:
        (message,) = await answers(stub, sketch_messages(header(), [HEAD] * 4))
    assert message.outcome.segments == 0
    assert [(miss.reason, miss.count) for miss in message.outcome.misses] == [("absent", 3)]
    assert manager.metric('recall_misses_total{reason="absent"}') == 3


def broken(**parts):
    """Return a sketch whose first layer has a head that is malformed."""
    messages = list(sketch_messages(header(), [HEAD] * 4))
    for name, value in parts.items():
        setattr(messages[1].layer.heads[0], name, value)
    return messages


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "part"),
        (list(sketch_messages(header(), [HEAD] * 4))[1:2], "part"),
        (list(sketch_messages(header(), [HEAD] * 4))[:2], "part"),
        (sketch_messages(header(session_id="No/id"), [HEAD] * 4), "header.session_id"),
        (sketch_messages(header(epoch=0), [HEAD] * 4), "header.epoch"),
        (sketch_messages(header(layers=1 << 20), [HEAD] * 4), "header.layers"),
        ([*sketch_messages(header(kv_heads=2), [HEAD] * 3)], "layer.heads"),
        (broken(queries=b"123"), "layer.heads.queries"),
        (broken(resident=b"12345"), "layer.heads.resident"),
    ],
)
async def test_what_is_malformed_is_refused(manager, connect, messages, field):
    async with connect(manager) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(stub, messages)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(field)
