"""Eviction policies, one a file. They are numpy: they see evidence, never keys or values."""

from scissorhands.errors import InvalidRequestError
from scissorhands.policies.base import Policy
from scissorhands.policies.catalog import STANDALONE, labels
from scissorhands.policies.merged import Merged
from scissorhands.policies.protected import Protected

_ALL: tuple[type[Policy], ...] = (*STANDALONE, Protected, Merged)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}


def policy_names() -> list[str]:
    """Return every policy as ``name`` or, beyond the default preset, ``name:preset``."""
    return [label for policy in POLICIES.values() for label in labels(policy)]


def get_policy(name: str, preset: str = "") -> Policy:
    """Return a policy by name and preset (empty: its first).

    Raises:
        InvalidRequestError: There is no such policy or preset.
    """
    if name not in POLICIES:
        raise InvalidRequestError("policy.name", f"unknown policy {name!r}; allowed: {', '.join(POLICIES)}")
    policy = POLICIES[name]
    preset = preset or policy.presets[0]
    if preset not in policy.presets:
        raise InvalidRequestError(
            "policy.preset", f"policy {name} has no preset {preset!r}; allowed: {', '.join(policy.presets)}"
        )
    return policy(preset)


__all__ = ["POLICIES", "Policy", "get_policy", "policy_names"]
