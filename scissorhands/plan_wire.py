"""Snapshots and plans as the protocol writes them, and the checked inverse."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from scissorhands.errors import InvalidRequestError
from scissorhands.snapshot import LayerEvidence, Plan, Snapshot, pack
from scissorhands.v1 import cache_manager_pb2, plan_pb2

# Snapshots that one call may carry.
MOST_SNAPSHOTS = 16
# About as many bytes of layers go into one part, and of parts into one message. A message may hold 4 MiB.
_PART_BYTES = 1 << 20

_TYPES: dict[int, np.dtype[np.generic]] = {
    plan_pb2.NUMBER_TYPE_UINT8: np.dtype("<u1"),
    plan_pb2.NUMBER_TYPE_UINT16: np.dtype("<u2"),
    plan_pb2.NUMBER_TYPE_UINT32: np.dtype("<u4"),
    plan_pb2.NUMBER_TYPE_FLOAT32: np.dtype("<f4"),
}
_NAMES = {dtype: number for number, dtype in _TYPES.items()}
_LARGEST_NUMBER_BYTES = 4

Array = npt.NDArray[np.generic]


def snapshot_parts(
    snapshot: Snapshot, session: cache_manager_pb2.SessionSpec, part_bytes: int = _PART_BYTES
) -> Iterator[cache_manager_pb2.SnapshotPart]:
    """Write a snapshot: a header, then its layers, several in a part while they are small.

    Args:
        snapshot: The snapshot.
        session: Its session, with its grant.
        part_bytes: Most bytes of a part that holds more than one layer.
    """
    header = cache_manager_pb2.SnapshotHeader(
        session=session,
        epoch=snapshot.epoch,
        step=snapshot.step,
        ahead=snapshot.ahead,
        incoming=snapshot.incoming,
        layer_lengths=[layer.length for layer in snapshot.layers],
        prompt=snapshot.prompt,
    )
    yield cache_manager_pb2.SnapshotPart(header=header)
    first, size = 0, 0
    for index, layer in enumerate(snapshot.layers):
        more = layer.positions.size * _LARGEST_NUMBER_BYTES * (1 + len(layer.signals))
        if index > first and size + more > part_bytes:
            yield cache_manager_pb2.SnapshotPart(evidence=_evidence(snapshot.layers[first:index], first))
            first, size = index, 0
        size += more
    yield cache_manager_pb2.SnapshotPart(evidence=_evidence(snapshot.layers[first:], first))


def plan_requests(
    snapshots: Iterable[tuple[Snapshot, cache_manager_pb2.SessionSpec]],
) -> Iterator[cache_manager_pb2.PlanEvictionsRequest]:
    """Write the messages that ask for the plans of at most :data:`MOST_SNAPSHOTS` snapshots.

    What is written is made message by message: whoever sends them may do other things in between.
    """
    request, size = cache_manager_pb2.PlanEvictionsRequest(), 0
    for snapshot, session in snapshots:
        for part in snapshot_parts(snapshot, session):
            more = part.ByteSize()
            if size and size + more > _PART_BYTES:
                yield request
                request, size = cache_manager_pb2.PlanEvictionsRequest(), 0
            request.parts.append(part)
            size += more
    yield request


def read_snapshot(
    header: cache_manager_pb2.SnapshotHeader, parts: Iterable[plan_pb2.Evidence], kv_heads: int
) -> Snapshot:
    """Read a snapshot whose parts have all arrived.

    Args:
        header: Its header.
        parts: Its evidence.
        kv_heads: KV heads of each entry of its grant.

    Raises:
        InvalidRequestError: A part is missing, out of order or of the wrong size.
    """
    lengths = header.layer_lengths
    layers: list[LayerEvidence] = []
    for part in parts:
        if part.first_layer != len(layers) or not 1 <= part.layers <= len(lengths) - len(layers):
            raise InvalidRequestError(
                "evidence.first_layer",
                f"expected layers from {len(layers)} of {len(lengths)}, got {part.layers} from {part.first_layer}",
            )
        shapes = [(kv_heads, length) for length in lengths[len(layers) : len(layers) + part.layers]]
        positions = _unpacked("evidence.positions", part.positions, shapes)
        if positions[0].dtype.kind != "u":
            raise InvalidRequestError("evidence.positions.type", "must be an unsigned integer type")
        signals = {name: _unpacked(f"evidence.signals.{name}", array, shapes) for name, array in part.signals.items()}
        for index, (_, length) in enumerate(shapes):
            own = {name: arrays[index] for name, arrays in signals.items()} if length else {}
            layers.append(LayerEvidence(positions[index].astype(np.int64), own))
    if len(layers) != len(lengths):
        raise InvalidRequestError("evidence", f"{len(lengths)} layers were announced, {len(layers)} came")
    return Snapshot(header.epoch, header.step, header.ahead, header.incoming, tuple(layers), header.prompt)


def plan_message(plan: Plan) -> plan_pb2.Plan:
    """Write a plan."""
    layers = [plan_pb2.LayerPlan(keep=np.packbits(keep, axis=1, bitorder="little").tobytes()) for keep in plan.keep]
    return plan_pb2.Plan(epoch=plan.epoch, step=plan.step, layers=layers)


def read_plan(message: plan_pb2.Plan, snapshot: Snapshot) -> Plan:
    """Read the plan that answers ``snapshot``.

    Raises:
        InvalidRequestError: It does not fit the snapshot.
    """
    if (message.epoch, message.step, len(message.layers)) != (snapshot.epoch, snapshot.step, len(snapshot.layers)):
        raise InvalidRequestError("plan", "answers another snapshot")
    keep = []
    for layer, evidence in zip(message.layers, snapshot.layers, strict=True):
        heads, length = evidence.positions.shape
        row_bytes = (length + 7) // 8
        if len(layer.keep) != heads * row_bytes:
            raise InvalidRequestError("plan.layers.keep", f"is {len(layer.keep)} bytes, not {heads * row_bytes}")
        bits = np.frombuffer(layer.keep, dtype=np.uint8).reshape(heads, row_bytes)
        kept = np.unpackbits(bits, axis=1, count=length, bitorder="little").view(np.bool_)
        if len({np.count_nonzero(head) for head in kept}) > 1:
            raise InvalidRequestError("plan.layers.keep", "must keep equally many slots in every head")
        keep.append(kept)
    return Plan(message.epoch, message.step, tuple(keep))


def _evidence(layers: Sequence[LayerEvidence], first: int) -> plan_pb2.Evidence:
    names = dict.fromkeys(name for layer in layers for name in layer.signals)
    return plan_pb2.Evidence(
        first_layer=first,
        layers=len(layers),
        positions=_packed([layer.positions for layer in layers]),
        # A layer with a window of its own has no slots, and nothing to tell of them.
        signals={name: _packed([layer.signals[name] for layer in layers if layer.length]) for name in names},
    )


def _packed(arrays: Sequence[Array]) -> plan_pb2.PackedArray:
    packed = pack(np.concatenate([array.ravel() for array in arrays]))
    packed = packed.astype(packed.dtype.newbyteorder("<"), copy=False)
    return plan_pb2.PackedArray(type=_NAMES[packed.dtype], data=packed.tobytes())  # type: ignore[arg-type]


def _unpacked(field: str, array: plan_pb2.PackedArray, shapes: Sequence[tuple[int, int]]) -> list[Array]:
    dtype = _TYPES.get(array.type)
    if dtype is None:
        raise InvalidRequestError(f"{field}.type", "must be set")
    ends = list(accumulate((heads * length for heads, length in shapes), initial=0))
    wanted = ends[-1] * dtype.itemsize
    if len(array.data) != wanted:
        raise InvalidRequestError(f"{field}.data", f"is {len(array.data)} bytes instead of {wanted}")
    numbers = np.frombuffer(array.data, dtype=dtype)
    return [numbers[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)]
