"""Between the core's types and the protocol's messages. Both ends of the link use it, so they cannot disagree."""

import re

from scissorhands.budget import BudgetRequest, BudgetUnit, EvictionParameters, Grant, ModelShape
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import resident
from scissorhands.grant import PolicyRequest
from scissorhands.profile import Profile
from scissorhands.v1 import budget_pb2, model_pb2

# The form of a session's id.
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
