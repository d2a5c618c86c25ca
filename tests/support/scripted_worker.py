"""A real gRPC server that plays a worker: the prompt's text says what happens."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager

from google.protobuf.duration_pb2 import Duration
from support.scripted_server import scripted_server

from scissorhands.errors import BudgetTooSmallError, CapacityError, InvalidRequestError, NotFoundError
from scissorhands.v1 import budget_pb2, generation_pb2, generation_pb2_grpc, model_pb2

# No scripted wait lasts longer, so that a broken test ends, in seconds.
LONGEST = 60.0


class Script(generation_pb2_grpc.GenerationServiceServicer):
    """Answers by the prompt, which it keeps with what became of it."""

    def __init__(self):
        self.requests = []
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.chat = True

    async def GetModel(self, request, context):  # noqa: N802 - gRPC's name.
        model = model_pb2.ModelInfo(name="scripted", architecture="Scripted", dtype="float32", layers=2)
        return generation_pb2.GetModelResponse(model=model, max_rows=4, chat=self.chat, policies=["h2o", "full"])

    async def Generate(self, request, context):  # noqa: N802 - gRPC's name.
        self.requests.append(request)
        self.started.set()
        text = request.text or (request.chat.messages[-1].content if request.chat.messages else "")
        word = text.split()[0] if text.split() else ""
        try:
            async for response in SCENES.get(word, answers)(text):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def reset(self):
        self.requests.clear()
        self.started.clear()
        self.cancelled.clear()
        self.chat = True


def accepted():
    grant = budget_pb2.Grant(
        policy="scissorhands",
        preset="default",
        layer_slots=[64, 64],
        drop=16,
        lookahead=8,
        chunk=32,
        recent=16,
        sinks=4,
        window=400,
        bytes=4096,
        raised=True,
        source=budget_pb2.GRANT_SOURCE_MANAGER,
        codec="int4",
        lease=Duration(seconds=30),
    )
    return generation_pb2.GenerateResponse(
        accepted=generation_pb2.Accepted(
            session_id="session-1", prompt_tokens=100, grant=grant, max_new_tokens=8, queued_ahead=2, seed=7
        )
    )


def prefill(done):
    return generation_pb2.GenerateResponse(prefill=generation_pb2.PrefillProgress(done=done, total=100))


def delta(text, *ids):
    return generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=text, token_ids=ids))


def finish():
    usage = generation_pb2.Usage(
        prompt_tokens=100,
        generated_tokens=5,
        queue_time=Duration(nanos=250_000_000),
        time_to_first_token=Duration(seconds=1, nanos=500_000_000),
        decode_time=Duration(seconds=2),
    )
    cache = generation_pb2.CacheStatistics(
        full_bytes=40_000,
        allocated_bytes=4_000,
        full_16bit_bytes=20_000,
        evictions=3,
        evicted_slots=1234,
        mass_dropped=0.0625,
        plans_manager=2,
        plans_local=1,
        prefill_stall=Duration(nanos=12_000_000),
        segments=3,
        segment_bytes=5_000,
        segments_dropped=1,
    )
    reason = generation_pb2.FINISH_REASON_STOP
    return generation_pb2.GenerateResponse(
        finish=generation_pb2.Finish(reason=reason, stop="[/end]", usage=usage, cache=cache)
    )


async def answers(text) -> AsyncIterator[generation_pb2.GenerateResponse]:
    yield accepted()
    yield prefill(50)
    yield prefill(100)
    yield delta("Héllo", 1, 2)
    yield delta("", 3)
    yield delta(" wörld", 4, 5)
    yield finish()


async def hangs_before_anything(text):
    await asyncio.sleep(LONGEST)
    yield accepted()


async def hangs(text):
    yield accepted()
    yield prefill(50)
    yield delta("begun", 1)
    await asyncio.sleep(LONGEST)


async def refuses(text):
    raise InvalidRequestError("sampling.top_p", "must be above 0 and at most 1, got 2")
    yield


async def refuses_budget(text):
    raise BudgetTooSmallError("budget.tokens", "too small for this policy: the smallest is 52 tokens, got 3", 52)
    yield


async def lacks_model(text):
    raise NotFoundError("model", "no model 'other'; this worker serves 'scripted'")
    yield


async def is_full(text):
    raise CapacityError("the queue of 8 requests is full", retry_after=2.5)
    yield


async def crashes(text):
    yield accepted()
    yield delta("half an ans", 1)
    raise RuntimeError("a failure that nobody foresaw")


async def lacks_finish(text):
    yield accepted()
    yield delta("all", 1)


async def sends_the_unknown(text):
    yield accepted()
    yield generation_pb2.GenerateResponse()
    yield delta("known", 1)
    yield finish()


SCENES: dict[str, Callable[[str], AsyncIterator[generation_pb2.GenerateResponse]]] = {
    "silence": hangs_before_anything,
    "hang": hangs,
    "refuse": refuses,
    "small-budget": refuses_budget,
    "other-model": lacks_model,
    "full": is_full,
    "crash": crashes,
    "unfinished": lacks_finish,
    "unknown": sends_the_unknown,
}


@contextmanager
def scripted_worker(port=0):
    """Serve on ``port`` of the loopback; 0 takes a free one."""
    script = Script()
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    with scripted_server("scissorhands.v1.GenerationService", add, script, port) as server:
        yield server
