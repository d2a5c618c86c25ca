"""Whatever a planner answers, and whenever, the cache keeps what it would keep without one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from support.engine_path import EnginePath, kept_positions
from support.oracle import RULES
from support.tiny_models import random_tokens, tiny_model

from scissorhands.plan import plan
from scissorhands.row import Phase, PlanSource, Row
from scissorhands.snapshot import Plan, Snapshot

PROMPT, TOKENS = 45, 110
DEADLINE = 0.25


@dataclass
class Answer:
    """A plan that has been asked for; notes the deadlines that it was taken with."""

    plan: Plan | None
    timeouts: list[float]

    def take(self, timeout: float) -> Plan | None:
        self.timeouts.append(timeout)
        return self.plan


@dataclass
class ScriptedPlanner:
    """Works every plan out at once, and answers what its script makes of it and of the plans before it."""

    script: Callable[[Plan, list[Plan]], Plan | None]
    snapshots: list[Snapshot] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)

    def submit(self, row: Row, snapshot: Snapshot) -> Answer:
        self.snapshots.append(snapshot)
        self.plans.append(plan(row.grant, snapshot))
        return Answer(self.script(self.plans[-1], self.plans[:-1]), self.timeouts)


def early(right: Plan, before: list[Plan]) -> Plan:
    return right


def never(right: Plan, before: list[Plan]) -> None:
    return None


def one_late(right: Plan, before: list[Plan]) -> Plan | None:
    return before[-1] if before else None


def of_another_epoch(right: Plan, before: list[Plan]) -> Plan:
    return replace(_another(right), epoch=right.epoch + 1)


def of_another_step(right: Plan, before: list[Plan]) -> Plan:
    return replace(_another(right), step=right.step - 1)


def drops_too_few(right: Plan, before: list[Plan]) -> Plan:
    return replace(right, keep=tuple(np.ones_like(keep) for keep in right.keep))


def drops_too_many(right: Plan, before: list[Plan]) -> Plan:
    return replace(right, keep=tuple(np.zeros_like(keep) for keep in right.keep))


def drops_unevenly(right: Plan, before: list[Plan]) -> Plan:
    keep = [layer.copy() for layer in right.keep]
    keep[1][0] = True
    return replace(right, keep=tuple(keep))


def has_too_few_layers(right: Plan, before: list[Plan]) -> Plan:
    return replace(right, keep=right.keep[:1])


def has_too_many_layers(right: Plan, before: list[Plan]) -> Plan:
    return replace(right, keep=(*right.keep, right.keep[0]))


def has_too_few_heads(right: Plan, before: list[Plan]) -> Plan:
    return replace(right, keep=tuple(keep[:1] for keep in right.keep))


def has_too_many_slots(right: Plan, before: list[Plan]) -> Plan:
    return replace(right, keep=tuple(np.pad(keep, ((0, 0), (0, 1)), constant_values=True) for keep in right.keep))


def every_second(right: Plan, before: list[Plan]) -> Plan | None:
    return right if len(before) % 2 else None


WRONG = [
    of_another_epoch,
    of_another_step,
    drops_too_few,
    drops_too_many,
    drops_unevenly,
    has_too_few_layers,
    has_too_many_layers,
    has_too_few_heads,
    has_too_many_slots,
]


@pytest.fixture(scope="module", params=RULES)
def undisturbed(request):
    return request.param, drive(request.param, None)


@pytest.mark.parametrize("script", [early, never, one_late, every_second, *WRONG], ids=lambda script: script.__name__)
def test_a_planner_changes_nothing(undisturbed, script):
    policy, expected = undisturbed
    planner = ScriptedPlanner(script)
    actual = drive(policy, planner)
    assert torch.equal(actual.logits, expected.logits)
    assert actual.kept == expected.kept
    # A row that is full before it has decoded a token, or that has no lookahead, asks nobody.
    asked = len(planner.timeouts)
    used = sum(eviction.source is PlanSource.MANAGER for eviction in actual.evictions)
    assert asked >= 2
    assert used == {early: asked, every_second: asked // 2}.get(script, 0)


def test_prefill_waits_for_a_plan_and_decoding_never_does():
    planner = ScriptedPlanner(early)
    evictions = drive("default", planner).evictions
    prefill = [eviction for eviction in evictions if eviction.phase is Phase.PREFILL]
    assert planner.timeouts == [DEADLINE] * len(prefill) + [0.0] * (len(evictions) - len(prefill))


def test_one_snapshot_is_in_flight_and_is_whole():
    planner = ScriptedPlanner(early)
    rules = RULES["default"]
    evictions = drive("default", planner).evictions
    # The last one may not have been due yet.
    assert len(planner.snapshots) - len(evictions) in (0, 1)
    for epoch, (snapshot, eviction) in enumerate(zip(planner.snapshots, evictions, strict=False)):
        assert snapshot.epoch == eviction.epoch == epoch
        assert snapshot.step + snapshot.ahead == eviction.step
        assert {layer.length + snapshot.ahead for layer in snapshot.layers} == {rules.B}
        if eviction.phase is Phase.PREFILL:
            assert (snapshot.ahead, snapshot.incoming) == (0, min(rules.c, PROMPT - snapshot.step))
        else:
            # The prompt may have left less room than the lookahead.
            assert snapshot.incoming == 1
            assert snapshot.ahead == rules.L or snapshot.step == PROMPT


def test_without_lookahead_decoding_asks_nobody():
    planner = ScriptedPlanner(early)
    drive("paper", planner)
    assert {snapshot.ahead for snapshot in planner.snapshots} == {0}
    assert all(snapshot.step < PROMPT for snapshot in planner.snapshots)


@pytest.mark.parametrize(("more", "snapshots"), [(0, 0), (1, 1)])
def test_nobody_is_asked_about_an_eviction_that_never_comes(more, snapshots):
    """With ``more`` of 0 the row ends exactly full, with 1 it must evict for its last token."""
    planner = ScriptedPlanner(early)
    engine = EnginePath(tiny_model("llama_grouped"), planner)
    budget = RULES["default"].B
    row = engine.add(RULES["default"])
    row.limit = budget + more
    tokens = random_tokens(budget + more, seed=6)
    engine.read(row, tokens[:1])
    for token in tokens[1:]:
        engine.decode([row], token.unsqueeze(0))
    assert len(planner.snapshots) == len(engine.evictions) == snapshots


@dataclass
class Driven:
    """What came of a sequence."""

    logits: torch.Tensor
    kept: list[list[list[list[int]]]]
    evictions: list


def drive(policy: str, planner: ScriptedPlanner | None) -> Driven:
    engine = EnginePath(tiny_model("llama_grouped"), planner)
    tokens = random_tokens(TOKENS, seed=6)
    row = engine.add(RULES[policy])
    logits = [engine.read(row, tokens[:PROMPT], deadline=DEADLINE)]
    kept = []
    for step in range(PROMPT, TOKENS):
        logits.append(engine.decode([row], tokens[step : step + 1]))
        kept.append(kept_positions(row))
    return Driven(torch.cat(logits), kept, engine.evictions)


def _another(right: Plan) -> Plan:
    """Return a plan that keeps other slots, equally many: it would do harm if it were taken."""
    return replace(right, keep=tuple(keep[:, ::-1].copy() for keep in right.keep))
