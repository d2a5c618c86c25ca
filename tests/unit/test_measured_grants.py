"""When a manager grants by what it has measured, and how it says so."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.manager_data import FINGERPRINT, model, spec

from scissorhands.errors import NotFoundError
from scissorhands.ledger import Ledger, LedgerLimits
from scissorhands.profile import Profile
from scissorhands.v1 import budget_pb2
from scissorhands.wire import model_shape, profile_message
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.sessions import Sessions
from scissorhands_server.manager.settings import ManagerSettings

EQUAL, PROFILE, MEASURED = (
    budget_pb2.BUDGET_SOURCE_EQUAL,
    budget_pb2.BUDGET_SOURCE_PROFILE,
    budget_pb2.BUDGET_SOURCE_MEASURED,
)
GIVEN = profile_message(Profile("", (0.1, 0.5), (((9.0, 3.0), (0.1, 0.01)), ((0.2, 0.01), (0.1, 0.02)))))


class Manager:
    """The part of a manager that grants, in this process."""

    def __init__(self, budgets):
        self.registry = CollectorRegistry()
        self.ledger = Ledger(LedgerLimits(100, 30, 600, 1 << 20, renewal=2), lambda: 1000.0)
        settings = ManagerSettings(budgets=budgets, budgets_renewal=2)
        self.sessions = Sessions(self.ledger, settings, ManagerMetrics(self.registry))

    def learn(self, *surprises, times=2):
        for _ in range(times):
            self.ledger.demands.learn(FINGERPRINT, "tiny", model_shape(model()), np.array(surprises))

    def count(self, source):
        return self.registry.get_sample_value("scissorhands_manager_budgets_total", {"source": source})


def test_measured_budgets_are_granted_once_they_are_there():
    manager = Manager("measured")
    assert [manager.count(source) for source in ("equal", "profile", "measured")] == [0, 0, 0]
    before = manager.sessions.open(spec("before", "scissorhands")).spec.grant
    assert (before.by_head, before.budget_source) == (False, EQUAL)
    manager.learn(1e-3, 1e-5, 1e-5, 1e-5)
    granted = manager.sessions.open(spec("after", "scissorhands")).spec.grant
    assert (granted.by_head, granted.budget_source) == (True, MEASURED)
    assert granted.layer_slots[0] > max(granted.layer_slots[1:])
    assert sum(granted.layer_slots) <= 2 * sum(before.layer_slots)
    assert granted.bytes <= before.bytes
    assert [manager.count(source) for source in ("equal", "profile", "measured")] == [1, 0, 1]


def test_a_grant_never_changes_while_its_session_runs():
    manager = Manager("measured")
    manager.learn(1e-3, 1e-5, 1e-5, 1e-5)
    first = manager.sessions.open(spec("s", "scissorhands")).spec.grant
    manager.learn(1e-5, 1e-5, 1e-5, 1e-1, times=8)
    assert manager.sessions.open(spec("s", "scissorhands")).spec.grant == first
    assert manager.sessions.open(spec("other", "scissorhands")).spec.grant.layer_slots != first.layer_slots


def test_given_profiles_win_and_other_policies_share_equally():
    manager = Manager("measured")
    manager.learn(1e-3, 1e-5, 1e-5, 1e-5)
    assert manager.sessions.open(spec("given", "scissorhands"), GIVEN).spec.grant.budget_source == PROFILE
    for policy in ("h2o", "scissorhands:uniform"):
        grant = manager.sessions.open(spec(policy.replace(":", "-"), policy)).spec.grant
        assert (grant.by_head, grant.budget_source) == (False, EQUAL)
    other = spec("other", "scissorhands", model=model(fingerprint="e" * 64))
    assert manager.sessions.open(other).spec.grant.budget_source == EQUAL


def test_nothing_is_granted_by_measurement_unless_asked_for():
    manager = Manager("given")
    manager.learn(1e-3, 1e-5, 1e-5, 1e-5)
    assert manager.sessions.open(spec("s", "scissorhands")).spec.grant.budget_source == EQUAL


def test_what_was_measured_can_be_asked_for():
    manager = Manager("given")
    with pytest.raises(NotFoundError, match="nothing was measured of any model"):
        manager.sessions.measured("")
    manager.learn(1e-3, 1e-5, 1e-5, 1e-5, times=1)
    with pytest.raises(NotFoundError, match="1 pairs of snapshots of 'tiny' were compared; a profile follows every 2"):
        manager.sessions.measured("tiny")
    manager.learn(1e-3, 1e-5, 1e-5, 1e-5, times=1)
    assert manager.sessions.measured("tiny") is manager.sessions.measured(FINGERPRINT)
    with pytest.raises(NotFoundError, match="'unknown'"):
        manager.sessions.measured("unknown")
