"""Prefixes to store, and what they are made of."""

from scissorhands.prefix import PrefixIdentity, PrefixManifest, boundaries
from scissorhands.prefix_state import PrefixPiece, save
from scissorhands.suspended import cut, describe
from scissorhands.v1 import prefix_pb2

BASE = PrefixIdentity("model", "tokenizer", "float32", "", "", "", "2", "default")


def manifest_of(boundary, grown, evidence, lengths=(2, 3), epoch=None):
    """Return the manifest of what is stored at a boundary."""
    return PrefixManifest(
        key=boundary.key,
        identity=boundary.identity,
        start=boundary.start,
        step=boundary.step,
        epoch=int(boundary.whole) if epoch is None else epoch,
        lengths=tuple(lengths),
        grown=describe(grown),
        evidence=describe(evidence),
    )


def piece_of(row, boundary):
    """Return a row's state at a boundary, its manifest written and read again."""
    saved = save(row, boundary.start)
    manifest = manifest_of(boundary, cut(saved.grown), cut(saved.evidence), row.lengths, row.epoch)
    read = PrefixManifest.parse(manifest.pack())
    read.check(boundary)
    return PrefixPiece(read, *(memoryview(bytearray(data)) for data in saved))


def read_prompt(speaker, row, ids, every):
    """Read a prompt; return its boundaries, and what the row was at each of them."""
    places = boundaries(BASE, speaker.grant, speaker.shape, ids, every)
    found, wanted = {}, {place.step: place for place in places}
    while (remaining := len(ids) - row.step) > 0:
        size = row.next_chunk(remaining)
        speaker.cache.prepare_prefill(row, size)
        speaker.step([row], [ids[row.step : row.step + size]])
        if row.step in wanted:
            found[row.step] = piece_of(row, wanted[row.step])
    return places, found


def store_messages(manifest, pieces):
    """Return the messages that store a boundary."""
    header = prefix_pb2.StorePrefixHeader(manifest=manifest.pack())
    return [
        prefix_pb2.StorePrefixRequest(header=header),
        *(prefix_pb2.StorePrefixRequest(chunk=bytes(piece)) for piece in pieces),
    ]


def load_request(places):
    """Return what asks for the longest prefix."""
    asked = [prefix_pb2.PrefixBoundary(key=place.key, whole=place.whole) for place in places]
    return prefix_pb2.LoadPrefixRequest(boundaries=asked)
