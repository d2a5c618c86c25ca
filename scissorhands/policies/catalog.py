"""The policies that stand on their own."""

from scissorhands.policies.base import Policy
from scissorhands.policies.expected_attention import ExpectedAttention
from scissorhands.policies.fastgen import FastGen
from scissorhands.policies.full import Full
from scissorhands.policies.h2o import H2O
from scissorhands.policies.r_kv import RKV
from scissorhands.policies.scissorhands import Scissorhands
from scissorhands.policies.snapkv import SnapKV
from scissorhands.policies.streaming import Streaming
from scissorhands.policies.tova import Tova

STANDALONE: tuple[type[Policy], ...] = (
    Scissorhands,
    H2O,
    Tova,
    SnapKV,
    RKV,
    FastGen,
    ExpectedAttention,
    Streaming,
    Full,
)


def labels(policy: type[Policy]) -> dict[str, str]:
    """Return the presets of a policy by how they are written: ``name`` or, beyond the default, ``name:preset``."""
    return {policy.name if preset == "default" else f"{policy.name}:{preset}": preset for preset in policy.presets}
