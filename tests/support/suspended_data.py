"""Suspended rows to store, and what they are made of."""

from dataclasses import fields, replace
from typing import NamedTuple

import grpc
from support.manager_data import model

from scissorhands.row_state import save
from scissorhands.suspended import Manifest, SuspendedIdentity, asked_identity, cut, describe, token_digest
from scissorhands.v1 import budget_pb2, suspension_pb2


class Resumed(NamedTuple):
    """What a turn got."""

    fence: int
    manifest: bytes
    data: bytes
    error: grpc.aio.AioRpcError | None

    @property
    def code(self):
        return self.error.code() if self.error else grpc.StatusCode.OK


def identity(**changes):
    """Return an identity of made-up texts."""
    texts = {field.name: f"some {field.name}" for field in fields(SuspendedIdentity)}
    return SuspendedIdentity(**{**texts, **changes})


def manifest_of(pieces, step=3, lengths=(2, 3), grant=b"grant", **changes):
    """Return the manifest of parts."""
    return Manifest(identity(**changes), step, 1, 2, tuple(lengths), grant, describe(pieces))


def suspended(row, ids):
    """Return a row's manifest, written and read again, and its parts."""
    pieces = cut(save(row, ids))
    manifest = Manifest(
        identity(tokens=token_digest(ids)), row.step, row.epoch, row.prompt, tuple(row.lengths), b"", describe(pieces)
    )
    return Manifest.parse(manifest.pack()), [bytes(piece) for piece in pieces]


def asked(**changes):
    """Return what a turn asks for."""
    usual = {"session_id": "s1", "model": model(), "policy": budget_pb2.Policy(name="h2o")}
    return suspension_pb2.ResumeSessionRequest(**{**usual, **changes})


def manifest_for(asked_for, pieces, tenant="default", **changes):
    """Return the manifest of parts of the row that a turn asks for."""
    return replace(
        manifest_of(pieces),
        identity=replace(asked_identity(asked_for), codec_version="1", tokens="t", tenant=tenant, **changes),
    )


async def resume(stub, **changes):
    """Take a session's lease; return the token, the manifest and the parts' bytes, and the error that ended it."""
    fence, manifest, data, error = 0, b"", b"", None
    try:
        async for message in stub.ResumeSession(asked(**changes), timeout=30):
            assert len(message.chunk) <= 1 << 20
            data += message.chunk
            if message.HasField("header"):
                fence, manifest = message.header.fence, message.header.manifest
    except grpc.aio.AioRpcError as raised:
        error = raised
    return Resumed(fence, manifest, data, error)


def suspend_messages(fence, pieces, manifest=None, **changes):
    """Return the messages that suspend a row."""
    wanted = manifest or manifest_for(asked(**changes), pieces).pack()
    session_id = changes.get("session_id", "s1")
    header = suspension_pb2.SuspendHeader(session_id=session_id, fence=fence, manifest=wanted)
    chunks = [piece[start : start + (1 << 20)] for piece in pieces for start in range(0, len(piece), 1 << 20)]
    return [
        suspension_pb2.SuspendSessionRequest(header=header),
        *(suspension_pb2.SuspendSessionRequest(chunk=bytes(chunk)) for chunk in chunks),
    ]


async def suspend(stub, fence, pieces, **changes):
    """Suspend a row; return the bytes stored."""
    return (await stub.SuspendSession(iter(suspend_messages(fence, pieces, **changes)), timeout=30)).stored_bytes
