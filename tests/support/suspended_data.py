"""Suspended rows to store, and what they are made of."""

from dataclasses import fields

from support.manager_data import model

from scissorhands.row_state import save
from scissorhands.suspended import Manifest, SuspendedIdentity, cut, describe, token_digest
from scissorhands.v1 import budget_pb2, suspension_pb2


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
