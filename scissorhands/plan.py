"""Planning: the pure function that both the manager and the worker compute."""

from scissorhands.budget import Grant
from scissorhands.policies import get_policy
from scissorhands.snapshot import Plan, Snapshot


def plan(grant: Grant, snapshot: Snapshot) -> Plan:
    """Decide which slots of ``snapshot`` to keep under ``grant``.

    It depends on nothing else, so it does not matter who computes it or how fast.
    """
    policy = get_policy(grant.policy, grant.preset)
    return policy.plan(grant.parameters, grant.layer_slots, snapshot)
