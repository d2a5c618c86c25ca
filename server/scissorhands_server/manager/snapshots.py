"""Receiving snapshots: the parts of one, checked before anything is kept of them, become a snapshot."""

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from scissorhands.budget import Grant
from scissorhands.errors import InvalidRequestError
from scissorhands.policies import get_policy
from scissorhands.snapshot import LayerEvidence, Snapshot
from scissorhands.v1 import cache_manager_pb2
from scissorhands.wire import model_shape, read_snapshot
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.stream import MessageStream

Requests = MessageStream[cache_manager_pb2.PlanEvictionRequest]

# What a slot takes while its plan is computed, beside its evidence: a position, a score and an index of 8 bytes each.
WORKING_BYTES = 24
_LARGEST_NUMBER_BYTES = 4


@dataclass(frozen=True)
class ReceivedSnapshot:
    """The parts of a snapshot as they came."""

    header: cache_manager_pb2.SnapshotHeader
    layers: list[cache_manager_pb2.LayerEvidence]


def needed_signals(grant: Grant) -> set[str]:
    """Return the signals that a snapshot must have, no more and no less."""
    return {"mass", *get_policy(grant.policy, grant.preset).signals(grant.parameters)}


async def receive_header(requests: Requests) -> cache_manager_pb2.SnapshotHeader:
    """Return the header, the first message of the stream.

    Raises:
        InvalidRequestError: It is something else.
    """
    first = await requests.next()
    if first is None or first.WhichOneof("part") != "header":
        raise InvalidRequestError("part", "the first message must be a header")
    return first.header


def check_header(header: cache_manager_pb2.SnapshotHeader, grant: Grant, limits: ManagerSettings) -> int:
    """Check what a header announces and return the memory that the plan will take, in bytes.

    Raises:
        InvalidRequestError: A number is out of range.
    """
    shape = grant.shape_of(model_shape(header.session.model))
    if len(header.layer_lengths) != shape.layers:
        raise InvalidRequestError("layer_lengths", f"must be {shape.layers} numbers, got {len(header.layer_lengths)}")
    for length, window in zip_longest(header.layer_lengths, shape.layer_windows, fillvalue=0):
        if window and length:
            raise InvalidRequestError("layer_lengths", f"must be 0 for a layer with a window, got {length}")
        if not window and not 1 <= length <= header.step:
            raise InvalidRequestError("layer_lengths", f"must be 1 to the {header.step} tokens seen, got {length}")
    for name in ("step", "epoch", "ahead", "incoming", "prompt"):
        if getattr(header, name) > limits.max_positions:
            raise InvalidRequestError(name, f"must be at most {limits.max_positions}, got {getattr(header, name)}")
    slots = shape.kv_heads * sum(header.layer_lengths)
    if slots > limits.max_snapshot_slots:
        raise InvalidRequestError("layer_lengths", f"announce {slots} slots, above the {limits.max_snapshot_slots}")
    return slots * (WORKING_BYTES + _LARGEST_NUMBER_BYTES * (1 + len(needed_signals(grant))))


async def receive_layers(
    requests: Requests, header: cache_manager_pb2.SnapshotHeader, grant: Grant
) -> ReceivedSnapshot:
    """Receive all layers.

    Raises:
        InvalidRequestError: A part is not what the header announced.
    """
    wanted = needed_signals(grant)
    kv_heads = grant.shape_of(model_shape(header.session.model)).kv_heads
    layers: list[cache_manager_pb2.LayerEvidence] = []
    while (message := await requests.next()) is not None:
        if message.WhichOneof("part") != "layer":
            raise InvalidRequestError("part", "after the header every message must be a layer")
        if len(layers) == len(header.layer_lengths):
            raise InvalidRequestError("layer", f"more than the {len(layers)} layers that were announced")
        length = header.layer_lengths[len(layers)]
        if set(message.layer.signals) != (wanted if length else set()):
            raise InvalidRequestError(
                "layer.signals",
                f"policy {grant.policy} takes {sorted(wanted) if length else 'none of a layer with a window'}, "
                f"got {sorted(message.layer.signals)}",
            )
        largest = kv_heads * length * _LARGEST_NUMBER_BYTES
        if any(len(array.data) > largest for array in (message.layer.positions, *message.layer.signals.values())):
            raise InvalidRequestError("layer", f"an array is above the {largest} bytes that were announced")
        layers.append(message.layer)
    return ReceivedSnapshot(header, layers)


def evidence_bytes(received: ReceivedSnapshot) -> int:
    """Return the bytes of evidence in a snapshot as it came."""
    return sum(len(array.data) for layer in received.layers for array in (layer.positions, *layer.signals.values()))


def checked_snapshot(received: ReceivedSnapshot) -> Snapshot:
    """Read a snapshot and check its numbers. It takes a while: call it off the event loop.

    Raises:
        InvalidRequestError: The evidence cannot be that of a row.
    """
    snapshot = read_snapshot(received.header, received.layers)
    for layer in snapshot.layers:
        if layer.length:
            _check_layer(layer, snapshot.step)
    return snapshot


def _check_layer(layer: LayerEvidence, step: int) -> None:
    positions = layer.positions
    if np.any(positions[:, 1:] <= positions[:, :-1]):
        raise InvalidRequestError("layer.positions", "must ascend within every head")
    if np.any(positions[:, -1] >= step):
        raise InvalidRequestError("layer.positions", f"must be below the step, {step}")
    for name, signal in layer.signals.items():
        if not np.all(np.isfinite(signal)):
            raise InvalidRequestError(f"layer.signals.{name}", "must be finite")
