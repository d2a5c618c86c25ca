"""What lies in the store, and rows that are put there through a manager."""

import contextlib

import grpc
from support.suspended_data import resume, suspend

from scissorhands.v1 import cache_manager_pb2


def keys(redis):
    """Return the names of all keys of ours."""
    return sorted(line for line in redis.command("KEYS", "*").decode().split("\r\n") if line.startswith("scissor"))


def parts(redis):
    """Return the keys of all parts of rows."""
    return [key for key in keys(redis) if key.rpartition(":")[2].isdecimal() and ":suspended:" in key]


def kept(redis):
    """Return the ids of the sessions that have parts of a row in the store."""
    return {key.split("/")[1].split("}")[0] for key in parts(redis)}


async def release(stub, fence, session_id="s1"):
    """End a turn that keeps nothing, as a worker does."""
    request = cache_manager_pb2.CloseSessionRequest(session_id=session_id, fence=fence)
    with contextlib.suppress(grpc.aio.AioRpcError):  # The ledger knows nothing of sessions that were never opened.
        await stub.CloseSession(request, timeout=10)


async def keep(stub, session_id, pieces):
    """Hold a turn of a session, and keep its row; return the fencing token."""
    turn = await resume(stub, session_id=session_id)
    await suspend(stub, turn.fence, pieces, session_id=session_id)
    return turn.fence
