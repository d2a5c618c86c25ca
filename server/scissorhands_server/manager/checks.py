"""Checks of what a call says about its session, before anything is done with it."""

import math

from scissorhands.budget import Grant
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import parse
from scissorhands.policies import get_policy
from scissorhands.tenant import TENANT, qualified, split
from scissorhands.v1 import cache_manager_pb2, quality_pb2
from scissorhands.wire import SESSION_ID, model_shape, read_grant
from scissorhands_server.manager.settings import ManagerSettings

_MAX_ELEMENT_BYTES = 16
_MAX_POLICY_PARAMETERS = 16
# Characters of the texts that a session carries; they are kept in the ledger.
_TEXT_LIMITS = {
    "name": 256,
    "fingerprint": 128,
    "tokenizer_fingerprint": 128,
    "architecture": 128,
    "dtype": 32,
}
_MAX_WORKER_ID = 64
_MAX_RESIDENT_CODEC = 64


def check_session_id(session_id: str, field: str = "session_id") -> None:
    """Check the form of a session's id.

    Raises:
        InvalidRequestError: It is malformed.
    """
    tenant, name = split(session_id)
    if not (SESSION_ID.fullmatch(name) and TENANT.fullmatch(tenant) and qualified(tenant, name) == session_id):
        raise InvalidRequestError(
            field, "must be 1 to 64 characters of [A-Za-z0-9_-], behind 'TENANT/' if it is not the default tenant's"
        )


def check_tenant(tenant: str, field: str = "tenant") -> None:
    """Check the form of a tenant's name.

    Raises:
        InvalidRequestError: It is malformed.
    """
    if not TENANT.fullmatch(tenant):
        raise InvalidRequestError(field, f"must match {TENANT.pattern}")


def check_spec(spec: cache_manager_pb2.SessionSpec, limits: ManagerSettings) -> None:
    """Check a session's id, model and length.

    Raises:
        InvalidRequestError: A field is missing or out of range.
    """
    check_session_id(spec.session_id, "session.session_id")
    model = spec.model
    model_shape(model)
    for name, most in (
        ("layers", limits.max_layers),
        ("kv_heads", limits.max_kv_heads),
        ("head_dim", limits.max_head_dim),
        ("element_bytes", _MAX_ELEMENT_BYTES),
    ):
        _check_range(f"session.model.{name}", getattr(model, name), 1, most)
    for name, most in _TEXT_LIMITS.items():
        if len(getattr(model, name)) > most:
            raise InvalidRequestError(f"session.model.{name}", f"must be at most {most} characters")
    if len(spec.worker_id) > _MAX_WORKER_ID:
        raise InvalidRequestError("session.worker_id", f"must be at most {_MAX_WORKER_ID} characters")
    if len(spec.resident_codec) > _MAX_RESIDENT_CODEC:
        raise InvalidRequestError("session.resident_codec", f"must be at most {_MAX_RESIDENT_CODEC} characters")
    if len(spec.policy.parameters) > _MAX_POLICY_PARAMETERS:
        raise InvalidRequestError("session.policy.parameters", f"must be at most {_MAX_POLICY_PARAMETERS}")
    positions = min(limits.max_positions, model.max_positions or limits.max_positions)
    _check_range("session.prompt_tokens", spec.prompt_tokens, 1, positions)
    _check_range("session.max_new_tokens", spec.max_new_tokens, 0, positions - spec.prompt_tokens)


def check_granted(spec: cache_manager_pb2.SessionSpec, limits: ManagerSettings) -> Grant:
    """Check a session that carries its grant, and return the grant.

    Raises:
        InvalidRequestError: A field is missing or out of range.
    """
    check_spec(spec, limits)
    if not spec.HasField("grant"):
        raise InvalidRequestError("session.grant", "must be set: the grant that the session got when it was opened")
    grant = read_grant(spec.grant)
    policy = get_policy(grant.policy, grant.preset)
    budgets = grant.shape_of(model_shape(spec.model)).layers
    if len(grant.layer_slots) != budgets:
        each = "KV head" if grant.by_head else "layer"
        raise InvalidRequestError(
            "session.grant.layer_slots", f"must be {budgets} numbers, one a {each}; got {len(grant.layer_slots)}"
        )
    for slots in (min(grant.layer_slots), max(grant.layer_slots)):
        _check_range("session.grant.layer_slots", slots, 1, limits.max_positions)
    for name in ("drop", "chunk"):
        _check_range(f"session.grant.{name}", getattr(grant.parameters, name), 1, limits.max_positions)
    policy.check(grant.parameters)
    for name in set(grant.codecs):
        try:
            parse(name).slot_bytes(spec.model.head_dim, spec.model.element_bytes)
        except InvalidRequestError as error:
            raise InvalidRequestError("session.grant.resident_codecs", error.description) from error
    return grant


def check_quality(quality: quality_pb2.Quality) -> None:
    """Check what a worker reports of a session's quality: it is kept, and shown to people.

    Raises:
        InvalidRequestError: A number is not finite or out of range.
    """
    for message, prefix, names in (
        (quality, "quality", ("recent_mass_dropped", "recent_mass_dropped_peak", "persistence")),
        (quality.divergence, "quality.divergence", ("same_share",)),
    ):
        for name in names:
            value = getattr(message, name)
            if not 0 <= value <= 1:  # False for NaN too.
                raise InvalidRequestError(f"{prefix}.{name}", f"must be 0 to 1, got {value:g}")
    if not 0 <= quality.divergence.nats < math.inf:
        raise InvalidRequestError(
            "quality.divergence.nats", f"must be a finite number of at least 0, got {quality.divergence.nats:g}"
        )


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(field, f"must be {least} to {most}, got {value}")
