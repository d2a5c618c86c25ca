"""Signals, one a file. They are torch: they turn attention into evidence, and policies decide by it."""

from scissorhands.budget import Grant
from scissorhands.policies import get_policy
from scissorhands.signals.base import Observation, Resident, Signal
from scissorhands.signals.expected_attention import ExpectedAttention
from scissorhands.signals.last_attention import LastAttention
from scissorhands.signals.low_count import LowCount
from scissorhands.signals.low_count_ring import LowCountRing
from scissorhands.signals.mass import Mass, add_mass
from scissorhands.signals.redundancy import Redundancy
from scissorhands.signals.token_kind import TokenKinds
from scissorhands.signals.weight import Weight
from scissorhands.signals.window_mass import WindowMass

SIGNALS: dict[str, type[Signal]] = {
    signal.name: signal
    for signal in (
        Mass,
        LowCount,
        LowCountRing,
        LastAttention,
        WindowMass,
        TokenKinds,
        ExpectedAttention,
        Redundancy,
        Weight,
    )
}


def signals_for(grant: Grant, group: int) -> tuple[Signal, ...]:
    """Return the signals that a grant's policy needs, with ``group`` query heads to a KV head; mass comes first."""
    policy = get_policy(grant.policy, grant.preset)
    names = (Mass.name, *policy.signals(grant.parameters))
    return tuple(SIGNALS[name].build(grant.parameters, group) for name in names)


__all__ = [
    "LastAttention",
    "LowCount",
    "Mass",
    "Observation",
    "Redundancy",
    "Resident",
    "Signal",
    "Weight",
    "WindowMass",
    "add_mass",
    "signals_for",
]
