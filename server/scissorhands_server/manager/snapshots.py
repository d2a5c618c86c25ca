"""Receiving snapshots: the parts of one, checked before anything is kept of them, become a snapshot."""

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from scissorhands.budget import Grant
from scissorhands.errors import InvalidRequestError
from scissorhands.plan_wire import MOST_SNAPSHOTS, read_snapshot
from scissorhands.policies import get_policy
from scissorhands.snapshot import LayerEvidence, Snapshot, joined
from scissorhands.v1 import cache_manager_pb2, plan_pb2
from scissorhands.wire import model_shape
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.stream import MessageStream

# What a slot takes while its plan is computed, beside its evidence: a position, a score and an index of 8 bytes each.
WORKING_BYTES = 24
_LARGEST_NUMBER_BYTES = 4


@dataclass(frozen=True)
class ReceivedSnapshot:
    """The parts of a snapshot as they came."""

    header: cache_manager_pb2.SnapshotHeader
    grant: Grant
    parts: list[plan_pb2.Evidence]

    @property
    def kv_heads(self) -> int:
        """KV heads of each entry of the grant."""
        return _kv_heads(self.header, self.grant)

    @property
    def evidence_bytes(self) -> int:
        """Bytes of evidence, as it came."""
        return sum(len(array.data) for part in self.parts for array in (part.positions, *part.signals.values()))


class SnapshotStream:
    """The snapshots of one call, whose parts are spread over its messages.

    Args:
        messages: The messages of the call.
    """

    def __init__(self, messages: MessageStream[cache_manager_pb2.PlanEvictionsRequest]) -> None:
        self._messages = messages
        self._parts: deque[cache_manager_pb2.SnapshotPart] = deque()

    async def headers(self) -> AsyncIterator[cache_manager_pb2.SnapshotHeader]:
        """Yield the header of each snapshot; what has not been read of the one before is passed over.

        Raises:
            InvalidRequestError: The first part is no header, or there are too many snapshots.
        """
        count = 0
        while (part := await self._next()) is not None:
            if part.WhichOneof("part") == "header":
                count += 1
                if count > MOST_SNAPSHOTS:
                    raise InvalidRequestError("parts", f"must be of at most {MOST_SNAPSHOTS} snapshots")
                yield part.header
            elif not count:
                break
        if not count:
            raise InvalidRequestError("parts", "the first must be a header")

    async def receive(self, header: cache_manager_pb2.SnapshotHeader, grant: Grant) -> ReceivedSnapshot:
        """Receive the evidence that follows a header, up to the next.

        Raises:
            InvalidRequestError: A part is not what the header announced.
        """
        wanted = needed_signals(grant)
        kv_heads = _kv_heads(header, grant)
        lengths = list(header.layer_lengths)
        received = ReceivedSnapshot(header, grant, [])
        layers = 0
        while (part := await self._next()) is not None:
            kind = part.WhichOneof("part")
            if kind == "header":
                self._parts.appendleft(part)
                break
            if kind != "evidence":
                raise InvalidRequestError("parts", "after a header every part must be evidence or the next header")
            evidence = part.evidence
            own = lengths[layers : layers + evidence.layers]
            layers += evidence.layers
            if layers > len(lengths):
                raise InvalidRequestError("evidence.layers", f"more than the {len(lengths)} layers that were announced")
            names = wanted if any(own) else set()
            if set(evidence.signals) != names:
                raise InvalidRequestError(
                    "evidence.signals",
                    f"policy {grant.policy} takes {sorted(names) or 'none of layers with a window'}, "
                    f"got {sorted(evidence.signals)}",
                )
            largest = kv_heads * sum(own) * _LARGEST_NUMBER_BYTES
            if any(len(array.data) > largest for array in (evidence.positions, *evidence.signals.values())):
                raise InvalidRequestError("evidence", f"an array is above the {largest} bytes that were announced")
            received.parts.append(evidence)
        return received

    async def _next(self) -> cache_manager_pb2.SnapshotPart | None:
        while not self._parts:
            message = await self._messages.next()
            if message is None:
                return None
            self._parts.extend(message.parts)
        return self._parts.popleft()


def needed_signals(grant: Grant) -> set[str]:
    """Return the signals that a snapshot must have, no more and no less."""
    return {"mass", *get_policy(grant.policy, grant.preset).signals(grant.parameters)}


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


def checked_snapshot(received: ReceivedSnapshot) -> Snapshot:
    """Read a snapshot and check its numbers. It takes a while: call it off the event loop.

    Raises:
        InvalidRequestError: The evidence cannot be that of a row.
    """
    snapshot = read_snapshot(received.header, received.parts, received.kv_heads)
    alike: dict[int, list[LayerEvidence]] = {}
    for layer in snapshot.layers:
        if layer.length:
            alike.setdefault(layer.length, []).append(layer)
    for layers in alike.values():
        _check_layer(joined(layers), snapshot.step)
    return snapshot


def _check_layer(layer: LayerEvidence, step: int) -> None:
    positions = layer.positions
    if np.any(positions[:, 1:] <= positions[:, :-1]):
        raise InvalidRequestError("evidence.positions", "must ascend within every head")
    if np.any(positions[:, -1] >= step):
        raise InvalidRequestError("evidence.positions", f"must be below the step, {step}")
    for name, signal in layer.signals.items():
        if not np.all(np.isfinite(signal)):
            raise InvalidRequestError(f"evidence.signals.{name}", "must be finite")


def _kv_heads(header: cache_manager_pb2.SnapshotHeader, grant: Grant) -> int:
    return grant.shape_of(model_shape(header.session.model)).kv_heads
