"""Eviction policies, one a file. They are numpy: they see evidence, never keys or values."""

from scissorhands.errors import InvalidRequestError
from scissorhands.policies.base import Policy
from scissorhands.policies.full import Full
from scissorhands.policies.h2o import H2O
from scissorhands.policies.scissorhands import Scissorhands
from scissorhands.policies.snapkv import SnapKV
from scissorhands.policies.streaming import Streaming
from scissorhands.policies.tova import Tova

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Scissorhands, H2O, Tova, SnapKV, Streaming, Full)
}


def policy_names() -> list[str]:
    """Return every policy as ``name`` or, beyond the default preset, ``name:preset``."""
    return [
        name if preset == "default" else f"{name}:{preset}"
        for name, policy in POLICIES.items()
        for preset in policy.presets
    ]


def get_policy(name: str, preset: str = "") -> Policy:
    """Return a policy by name and preset (empty: default).

    Raises:
        InvalidRequestError: There is no such policy or preset.
    """
    if name not in POLICIES:
        raise InvalidRequestError("policy.name", f"unknown policy {name!r}; allowed: {', '.join(POLICIES)}")
    policy = POLICIES[name]
    preset = preset or "default"
    if preset not in policy.presets:
        raise InvalidRequestError(
            "policy.preset", f"policy {name} has no preset {preset!r}; allowed: {', '.join(policy.presets)}"
        )
    return policy(preset)


__all__ = ["POLICIES", "Policy", "get_policy", "policy_names"]
