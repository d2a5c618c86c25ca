"""Calls of any content to a running manager and worker, and what is wrong with an answer."""

import asyncio
import math
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.fuzzed_bytes import edited, examples, random_edits
from support.manager_data import model, opened, plan_parts, requests_of, segment, snapshot, spec, upload
from support.manager_here import manager_here
from support.suspended_data import asked, suspend_messages
from support.tiny_worker import tiny_worker

from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc, generation_pb2
from scissorhands_server.status import ERROR_DOMAIN, STATUS_TABLE

# Nothing of ours may take longer than this to answer a small call.
DEADLINE = 60.0
# More of an answer is not waited for: the call is cancelled, as clients do.
_MOST_RESPONSES = 40
_REASONS = {row.reason for row in STATUS_TABLE.values()}
# What gRPC's asyncio client itself says, now and then, of a stream whose answer comes before all requests are sent.
_UNHEARD = "Internal error from Core"
_TRIES = 5
_FAULTS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}

_TEXTS = (
    *("", "s1", "s2", "w1", "tiny", "h2o", "scissorhands", "paper", "merged:h2o", "protected:tova", "int4", "none"),
    *("user", "mass", "window", "no/id", "../..", "\0", "ä" * 50, "x" * 5000, "a:b:c", "a stop"),
)
_WHOLE = (0, 1, 2, 3, 7, 16, 64, 900)
_REAL = (0.0, 0.2, 0.5, 1.0, 3.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan)
_BITS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 64),
    FieldDescriptor.CPPTYPE_INT32: (31, 31),
    FieldDescriptor.CPPTYPE_INT64: (63, 63),
}
_BYTES = [data for name in ("segment", "row", "prefix") for data in examples(name)]


class Method(NamedTuple):
    """A method of a service.

    Args:
        path: As gRPC calls it.
        request: Class of its requests.
        kind: Such as ``stream_unary``.
    """

    path: str
    request: type
    kind: str

    @property
    def streams(self):
        """Whether it takes a stream of requests."""
        return self.kind.startswith("stream")


def methods_of(file):
    """Return the methods of the services of a generated module."""
    found = []
    for service in file.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            ways = (method.client_streaming, method.server_streaming)
            kind = "_".join("stream" if own else "unary" for own in ways)
            found.append(Method(f"/{service.full_name}/{method.name}", method.input_type._concrete_class, kind))
    return found


def filled(kind, rng, depth=0):
    """Return a message of any fields with any values."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.6:
            _set(message, field, rng, depth)
    return message


def changed(message, rng):
    """Return a message with one field, at any depth, of another value."""
    copy = type(message)()
    copy.CopyFrom(message)
    inner = copy
    while True:
        messages = [
            value
            for field, value in inner.ListFields()
            if field.message_type and not field.is_repeated and not field.message_type.GetOptions().map_entry
        ]
        if not messages or rng.random() < 0.35:
            break
        inner = rng.choice(messages)
    if fields := list(inner.DESCRIPTOR.fields):
        field = rng.choice(fields)
        inner.ClearField(field.name)
        if rng.random() < 0.85:
            _set(inner, field, rng, 1)
    return copy


def _set(message, field, rng, depth):
    if field.message_type and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(rng.choice((1, 1, 3))):
            if value.message_type:
                entries[_value(key, rng)].CopyFrom(filled(value.message_type._concrete_class, rng, depth + 1))
            else:
                entries[_value(key, rng)] = _value(value, rng)
    elif field.message_type:
        if depth < 4:
            inner = field.message_type._concrete_class
            if field.is_repeated:
                getattr(message, field.name).extend(filled(inner, rng, depth + 1) for _ in range(rng.choice((1, 3))))
            else:
                getattr(message, field.name).CopyFrom(filled(inner, rng, depth + 1))
    elif field.is_repeated:
        getattr(message, field.name).extend(_value(field, rng) for _ in range(rng.choice((1, 2, 30))))
    else:
        setattr(message, field.name, _value(field, rng))


def _value(field, rng):
    kind = field.cpp_type
    if kind in _BITS:
        below, above = _BITS[kind]
        most = (1 << above) - 1
        return rng.choice((*_WHOLE, most, most - 1, -(1 << below) if below else 0, rng.getrandbits(above)))
    if kind in {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}:
        return rng.choice((*_REAL, rng.random()))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((*(value.number for value in field.enum_type.values), 77))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((*_BYTES, b"", rng.randbytes(rng.choice((1, 32, 300)))))
    return rng.choice(_TEXTS)


class Fuzz:
    """A manager and a worker that runs under it, and calls to both.

    Args:
        manager: Channel to the manager.
        worker: Channel to the worker.
        seeds: Whole requests by the path of their method.
    """

    def __init__(self, manager, worker, seeds):
        self._manager, self._worker, self._seeds = manager, worker, seeds
        self.managers, self.workers = methods_of(cache_manager_pb2), methods_of(generation_pb2)
        # Calls by the method's path and the status that it ended with.
        self.answers = Counter()

    def requests(self, method, rng):
        """Return the bytes of requests: any fields, whole ones with some changes, or bytes that may be no message."""
        seeds = self._seeds.get(method.path, [])
        messages = rng.choice(seeds) if seeds and rng.random() < 0.75 else []
        messages = messages or [
            filled(method.request, rng) for _ in range(rng.choice((0, 1, 2)) if method.streams else 1)
        ]
        if rng.random() < 0.9:
            for _ in range(rng.choice((0, 1, 1, 2, 4))):
                at = rng.randrange(len(messages)) if messages else 0
                messages = [*messages[:at], *(changed(one, rng) for one in messages[at : at + 1]), *messages[at + 1 :]]
        data = [message.SerializeToString() for message in messages]
        if method.streams and data and rng.random() < 0.3:
            at = rng.randrange(len(data))
            data[at : at + 1] = rng.choice(([], [data[at]] * 2))
        if data and rng.random() < 0.15:
            at = rng.randrange(len(data))
            data[at] = edited(data[at], random_edits(rng))
        return data

    async def call(self, method, requests):
        """Call a method; return what is wrong with the answer, or nothing."""
        for _ in range(_TRIES):
            code, fault = await self._answer(method, requests)
            if _UNHEARD not in fault:
                break
        self.answers[method.path.rpartition("/")[2], code.name] += 1
        return fault

    async def _answer(self, method, requests):
        channel = self._worker if method in self.workers else self._manager
        outgoing = iter(requests) if method.streams else requests[0]
        code, fault = grpc.StatusCode.OK, ""
        try:
            call = getattr(channel, method.kind)(method.path)(outgoing, timeout=DEADLINE)
            if method.kind.endswith("stream"):
                count = 0
                async for _ in call:
                    count += 1
                    if count == _MOST_RESPONSES:
                        call.cancel()
                        break
            else:
                await call
        except grpc.aio.AioRpcError as error:
            code, fault = error.code(), fault_of(error)
        return code, fault

    async def _told_of_store(self, stub):
        try:
            await stub.DeleteSession(_deletes("still-here"), timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def served(self):
        """Make sure that both servers still answer; a store that was slow may be given up for a moment."""
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(self._manager)
        async with asyncio.timeout(DEADLINE):
            while (await self._told_of_store(stub)) == grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(0.1)
        session = await opened(stub, spec("still-here"))
        assert session.grant.layer_slots
        await stub.DeleteSession(_deletes("still-here"), timeout=DEADLINE)
        call = self._worker.unary_stream("/scissorhands.v1.GenerationService/Generate")
        request = generation_pb2.GenerateRequest(text="Hello", max_new_tokens=3, ignore_eos=True)
        last = [data async for data in call(request.SerializeToString(), timeout=DEADLINE)][-1]
        assert generation_pb2.GenerateResponse.FromString(last).finish.usage.generated_tokens == 3


def fault_of(error):
    """Return what is wrong with the status of a failed call: nothing, if it is one of the tree of errors."""
    with suppress(ValueError):
        status = rpc_status.from_call(error)
        info = error_details_pb2.ErrorInfo()
        told = status is not None and any(detail.Unpack(info) for detail in status.details)
        if told and info.domain == ERROR_DOMAIN and info.reason in _REASONS and error.code() not in _FAULTS:
            return ""
    return f"{error.code().name}: {error.details()}"


def is_message(method, data):
    """Tell whether bytes are a message of a method."""
    try:
        method.request.FromString(data)
    except DecodeError:
        return False
    return True


@asynccontextmanager
async def fuzzed_services(redis):
    """Run a manager on a store, and a worker under it."""
    options = [("grpc.max_receive_message_length", -1)]
    async with (
        manager_here(redis) as here,
        tiny_worker(manager=here.address, rows=4, default_max_new_tokens=4, session_patience=0.1) as (worker, _),
        grpc.aio.insecure_channel(here.address, options) as manager,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}", options) as generation,
    ):
        yield Fuzz(manager, generation, await _seeds(cache_manager_pb2_grpc.CacheManagerServiceStub(manager)))


def _deletes(session_id):
    return methods_by_name["DeleteSession"].request(session_id=session_id)


async def _seeds(stub):
    """Return whole requests of the methods whose requests random fields do not reach far into."""
    session = await opened(stub, spec(policy="h2o"))
    generate = generation_pb2.GenerateRequest(text="Once upon a time", max_new_tokens=3, ignore_eos=True)
    long = generation_pb2.GenerateRequest(text="word " * 40, max_new_tokens=8, session_id="s2")
    long.budget.tokens = 96
    chat = generation_pb2.GenerateRequest(max_new_tokens=2)
    chat.chat.messages.add(role="user", content="Hello")
    pieces = [b"some bytes", bytes(300)]
    prefix = methods_by_name["StorePrefix"].request
    seeds = {
        "OpenSession": [[cache_manager_pb2.OpenSessionRequest(session=spec(policy="h2o"))]],
        "RenewSessions": [[cache_manager_pb2.RenewSessionsRequest(sessions=[session])]],
        "PlanEvictions": [requests_of(plan_parts(snapshot(session), session))],
        "OffloadSegments": [upload(session, (0, segment(session, 0)), (1, segment(session, 1)))],
        "FetchSegments": [[cache_manager_pb2.FetchSegmentsRequest(session_id="s1", epochs=[0, 1])]],
        "RecallSections": [_sketch()],
        "ResumeSession": [[asked()]],
        "SuspendSession": [suspend_messages(1, pieces)],
        "StorePrefix": [
            [
                prefix(header={"manifest": examples("prefix")[0]}),
                *(prefix(chunk=piece) for piece in [*pieces, pieces[0]]),
            ]
        ],
        "Generate": [[generate], [long], [chat]],
    }
    return {methods_by_name[name].path: messages for name, messages in seeds.items()}


def _sketch():
    request = methods_by_name["RecallSections"].request
    head = {"queries": bytes(2 * 3 * model().head_dim), "resident": bytes(20), "allowance": 4}
    layer = request(layer={"heads": [head, head]})
    return [request(header={"session_id": "s1", "epoch": 2, "layers": 2, "kv_heads": 2, "head_dim": 8}), layer, layer]


methods_by_name = {
    method.path.rpartition("/")[2]: method
    for file in (cache_manager_pb2, generation_pb2)
    for method in methods_of(file)
}


async def fuzz_calls(fuzz, methods, rng, count, told=lambda _done: None):
    """Make calls, eight at a time; return what was wrong: method, requests in hex, fault."""
    findings = []
    left = iter(range(count))

    async def some():
        for index in left:
            method = rng.choice(methods)
            requests = fuzz.requests(method, rng)
            if fault := await fuzz.call(method, requests):
                findings.append({"method": method.path, "requests": [one.hex() for one in requests], "fault": fault})
            told(index + 1)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(some())
    return findings
