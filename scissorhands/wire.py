"""Between the core's types and the protocol's messages. Both ends of the link use it, so they cannot disagree."""

import re
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from scissorhands.budget import BudgetRequest, BudgetUnit, EvictionParameters, Grant, ModelShape
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import resident
from scissorhands.grant import PolicyRequest
from scissorhands.profile import Profile
from scissorhands.snapshot import LayerEvidence, Plan, Snapshot, pack
from scissorhands.v1 import budget_pb2, cache_manager_pb2, model_pb2

# The form of a session's id.
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_TYPES: dict[int, np.dtype[np.generic]] = {
    cache_manager_pb2.NUMBER_TYPE_UINT8: np.dtype("<u1"),
    cache_manager_pb2.NUMBER_TYPE_UINT16: np.dtype("<u2"),
    cache_manager_pb2.NUMBER_TYPE_UINT32: np.dtype("<u4"),
    cache_manager_pb2.NUMBER_TYPE_FLOAT32: np.dtype("<f4"),
}
_NAMES = {dtype: number for number, dtype in _TYPES.items()}


def budget_request(message: budget_pb2.Budget) -> BudgetRequest:
    """Read a budget.

    Raises:
        InvalidRequestError: No amount is set, or it is out of range.
    """
    amount = message.WhichOneof("amount")
    if amount is None:
        raise InvalidRequestError("budget.amount", "set one of tokens, bytes, fraction or compression")
    return BudgetRequest(BudgetUnit(amount), getattr(message, amount))


def budget_message(request: BudgetRequest) -> budget_pb2.Budget:
    """Write a budget."""
    if request.unit is BudgetUnit.FRACTION:
        return budget_pb2.Budget(fraction=request.amount)
    if request.unit is BudgetUnit.COMPRESSION:
        return budget_pb2.Budget(compression=request.amount)
    if request.unit is BudgetUnit.BYTES:
        return budget_pb2.Budget(bytes=int(request.amount))
    return budget_pb2.Budget(tokens=int(request.amount))


def policy_request(message: budget_pb2.Policy) -> PolicyRequest:
    """Read a policy; the name may be written as ``name:preset``."""
    name, _, preset = message.name.partition(":")
    return PolicyRequest(name, message.preset or preset, dict(message.parameters))


def policy_message(request: PolicyRequest) -> budget_pb2.Policy:
    """Write a policy."""
    return budget_pb2.Policy(name=request.name, preset=request.preset, parameters=request.parameters)


def model_shape(message: model_pb2.ModelInfo) -> ModelShape:
    """Read the sizes that decide how large a model's cache is.

    Raises:
        InvalidRequestError: A size is missing, or the windows are not of all layers.
    """
    for name in ("layers", "kv_heads", "head_dim", "element_bytes"):
        if getattr(message, name) < 1:
            raise InvalidRequestError(f"session.model.{name}", "must be at least 1")
    if len(message.layer_windows) not in (0, message.layers):
        raise InvalidRequestError("session.model.layer_windows", f"must be {message.layers} numbers or none")
    group = max(1, message.query_heads // message.kv_heads)
    return ModelShape(
        message.layers,
        message.kv_heads,
        message.head_dim,
        message.element_bytes,
        group,
        tuple(message.layer_windows) if any(message.layer_windows) else (),
    )


def profile_message(profile: Profile) -> model_pb2.Profile:
    """Write a profile."""
    losses, bits = (
        [loss for layer in table for head in layer for loss in head] for table in (profile.losses, profile.bits)
    )
    return model_pb2.Profile(shares=profile.shares, losses=losses, model=profile.model, bits=bits)


def read_profile(message: model_pb2.Profile, shape: ModelShape) -> Profile:
    """Read the profile of a model of ``shape``.

    Raises:
        InvalidRequestError: The numbers do not make a profile of such a model.
    """
    shares, losses, bits = list(message.shares), list(message.losses), list(message.bits)
    return Profile.of(message.model, shares, losses, shape.layers, shape.kv_heads, bits)


def grant_message(grant: Grant, source: budget_pb2.GrantSource.ValueType, codec: str) -> budget_pb2.Grant:
    """Write a grant; the caller adds the lease, and tells if budgets by head come from elsewhere than a profile."""
    numbers = grant.parameters
    names = list(dict.fromkeys(grant.codecs))
    return budget_pb2.Grant(
        policy=grant.policy,
        preset=grant.preset,
        layer_slots=grant.layer_slots,
        drop=numbers.drop,
        lookahead=numbers.lookahead,
        chunk=numbers.chunk,
        recent=numbers.recent,
        sinks=numbers.sinks,
        window=numbers.window,
        tail=numbers.tail,
        bytes=grant.bytes,
        raised=grant.raised,
        by_head=grant.by_head,
        budget_source=budget_pb2.BUDGET_SOURCE_PROFILE if grant.by_head else budget_pb2.BUDGET_SOURCE_EQUAL,
        source=source,
        codec=codec,
        resident_codecs=names,
        resident_codec_indices=[names.index(name) for name in grant.codecs],
    )


def read_grant(message: budget_pb2.Grant) -> Grant:
    """Read a grant.

    Raises:
        InvalidRequestError: Its resident formats are unknown, cannot be resident, or are not of all its entries.
    """
    return Grant(
        policy=message.policy,
        preset=message.preset,
        layer_slots=tuple(message.layer_slots),
        parameters=EvictionParameters(
            recent=message.recent,
            sinks=message.sinks,
            drop=message.drop,
            lookahead=message.lookahead,
            chunk=message.chunk,
            window=message.window,
            tail=message.tail,
        ),
        bytes=message.bytes,
        raised=message.raised,
        by_head=message.by_head,
        codecs=_resident_codecs(message),
    )


def _resident_codecs(message: budget_pb2.Grant) -> tuple[str, ...]:
    names, indices = message.resident_codecs, message.resident_codec_indices
    field = "session.grant.resident_codecs"
    if len(indices) != (len(message.layer_slots) if names else 0):
        raise InvalidRequestError(
            "session.grant.resident_codec_indices",
            f"must be {len(message.layer_slots)} numbers, one for each of layer_slots, or none without names; "
            f"got {len(indices)}",
        )
    if len(names) > len(indices) or len(set(names)) != len(names):
        raise InvalidRequestError(field, "must be different names, no more than there are layer_slots")
    for name in names:
        try:
            full = resident(name).name
        except InvalidRequestError as error:
            raise InvalidRequestError(field, error.description) from error
        if name != full:
            raise InvalidRequestError(field, f"must be full names: {full}, got {name!r}")
    if any(index >= len(names) for index in indices):
        raise InvalidRequestError("session.grant.resident_codec_indices", f"must be below {len(names)}")
    return tuple(names[index] for index in indices)


def snapshot_messages(
    snapshot: Snapshot, session: cache_manager_pb2.SessionSpec
) -> Iterator[cache_manager_pb2.PlanEvictionRequest]:
    """Write a snapshot: a header, then one message a layer, so that no message grows with the number of layers."""
    header = cache_manager_pb2.SnapshotHeader(
        session=session,
        epoch=snapshot.epoch,
        step=snapshot.step,
        ahead=snapshot.ahead,
        incoming=snapshot.incoming,
        layer_lengths=[layer.length for layer in snapshot.layers],
        prompt=snapshot.prompt,
    )
    yield cache_manager_pb2.PlanEvictionRequest(header=header)
    for index, layer in enumerate(snapshot.layers):
        evidence = cache_manager_pb2.LayerEvidence(
            layer=index,
            positions=_packed(layer.positions),
            signals={name: _packed(signal) for name, signal in layer.signals.items()},
        )
        yield cache_manager_pb2.PlanEvictionRequest(layer=evidence)


def read_snapshot(
    header: cache_manager_pb2.SnapshotHeader, layers: Iterable[cache_manager_pb2.LayerEvidence]
) -> Snapshot:
    """Read a snapshot whose parts have all arrived.

    Raises:
        InvalidRequestError: A part is missing, out of order or of the wrong size.
    """
    session = header.session
    kv_heads = read_grant(session.grant).shape_of(model_shape(session.model)).kv_heads
    lengths = header.layer_lengths
    evidence = []
    for index, layer in enumerate(layers):
        if layer.layer != index or index >= len(lengths):
            raise InvalidRequestError("layer.layer", f"expected layer {index} of {len(lengths)}, got {layer.layer}")
        shape = (kv_heads, lengths[index])
        signals = {name: _unpacked(f"layer.signals.{name}", array, shape) for name, array in layer.signals.items()}
        positions = _unpacked("layer.positions", layer.positions, shape)
        if positions.dtype.kind != "u":
            raise InvalidRequestError("layer.positions.type", "must be an unsigned integer type")
        evidence.append(LayerEvidence(positions=positions.astype(np.int64), signals=signals))
    if len(evidence) != len(lengths):
        raise InvalidRequestError("layer", f"{len(lengths)} layers were announced, {len(evidence)} came")
    return Snapshot(header.epoch, header.step, header.ahead, header.incoming, tuple(evidence), header.prompt)


def plan_message(plan: Plan) -> cache_manager_pb2.PlanEvictionResponse:
    """Write a plan."""
    layers = [
        cache_manager_pb2.LayerPlan(keep=np.packbits(keep, axis=1, bitorder="little").tobytes()) for keep in plan.keep
    ]
    return cache_manager_pb2.PlanEvictionResponse(epoch=plan.epoch, step=plan.step, layers=layers)


def read_plan(message: cache_manager_pb2.PlanEvictionResponse, snapshot: Snapshot) -> Plan:
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
        kept = np.unpackbits(bits, axis=1, count=length, bitorder="little").astype(np.bool_)
        if np.ptp(kept.sum(axis=1)):
            raise InvalidRequestError("plan.layers.keep", "must keep equally many slots in every head")
        keep.append(kept)
    return Plan(message.epoch, message.step, tuple(keep))


def _packed(array: npt.NDArray[np.generic]) -> cache_manager_pb2.PackedArray:
    packed = pack(array)
    packed = packed.astype(packed.dtype.newbyteorder("<"), copy=False)
    return cache_manager_pb2.PackedArray(type=_NAMES[packed.dtype], data=packed.tobytes())  # type: ignore[arg-type]


def _unpacked(field: str, array: cache_manager_pb2.PackedArray, shape: tuple[int, int]) -> npt.NDArray[np.generic]:
    dtype = _TYPES.get(array.type)
    if dtype is None:
        raise InvalidRequestError(f"{field}.type", "must be set")
    wanted = shape[0] * shape[1] * dtype.itemsize
    if len(array.data) != wanted:
        raise InvalidRequestError(f"{field}.data", f"is {len(array.data)} bytes instead of {wanted}")
    return np.frombuffer(array.data, dtype=dtype).reshape(shape)
