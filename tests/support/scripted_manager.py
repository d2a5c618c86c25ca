"""A real gRPC server that plays a manager with a few sessions."""

from contextlib import contextmanager

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from support.scripted_server import scripted_server

from scissorhands.errors import NotFoundError
from scissorhands.v1 import (
    budget_pb2,
    cache_manager_pb2,
    cache_manager_pb2_grpc,
    model_pb2,
    quality_pb2,
    suspension_pb2,
)

COUNT = 5


def session(number, *, segments):
    spec = cache_manager_pb2.SessionSpec(
        session_id=f"session-{number}",
        worker_id="worker-1",
        model=model_pb2.ModelInfo(name="[tiny]", architecture="Scripted", dtype="float32"),
        prompt_tokens=100,
        max_new_tokens=8,
        budget=budget_pb2.Budget(fraction=0.2),
        policy=budget_pb2.Policy(name="h2o"),
        grant=budget_pb2.Grant(policy="h2o", preset="default", layer_slots=[20, 22], lease=Duration(seconds=30)),
    )
    found = cache_manager_pb2.Session(
        spec=spec,
        state=cache_manager_pb2.SESSION_STATE_OPEN if number % 2 else cache_manager_pb2.SESSION_STATE_CLOSED,
        open_time=Timestamp(seconds=1_700_000_000 + number),
        evictions=2,
        evicted_slots=1234,
        mass_dropped=0.125,
        persistence=[0.5, 1.0],
        segment_count=1,
        segment_bytes=5_000,
        quality=quality_pb2.Quality(shadow=quality_pb2.SHADOW_RESULT_LATE, persistence=0.8),
    )
    if segments:
        found.segments.add(epoch=0, step=64, slots=617, size_bytes=5_000)
        found.suspended.step, found.suspended.size_bytes = 2_015, 7_000_000
    return found


class Ledger(cache_manager_pb2_grpc.CacheManagerServiceServicer):
    """Holds ``COUNT`` sessions; its page tokens are the index of the next one."""

    def __init__(self):
        self.page_sizes = []
        self.deleted = []

    async def GetSession(self, request, context):  # noqa: N802 - gRPC's name.
        known = [f"session-{number}" for number in range(COUNT)]
        if request.session_id not in known:
            raise NotFoundError("session_id", f"no session {request.session_id!r}")
        found = session(known.index(request.session_id), segments=True)
        return cache_manager_pb2.GetSessionResponse(session=found)

    async def ListSessions(self, request, context):  # noqa: N802 - gRPC's name.
        self.page_sizes.append(request.page_size)
        found = [session(number, segments=False) for number in reversed(range(COUNT))]
        found = [each for each in found if request.state in (0, each.state)]
        first = int(request.page_token or 0)
        after = first + request.page_size
        return cache_manager_pb2.ListSessionsResponse(
            sessions=found[first:after], next_page_token=str(after) if after < len(found) else ""
        )

    async def DeleteSession(self, request, context):  # noqa: N802 - gRPC's name.
        self.deleted.append(request.session_id)
        return suspension_pb2.DeleteSessionResponse(deleted=1234)


@contextmanager
def scripted_manager():
    add = cache_manager_pb2_grpc.add_CacheManagerServiceServicer_to_server
    with scripted_server("scissorhands.v1.CacheManagerService", add, Ledger()) as server:
        yield server
