"""Sessions that teach a manager what heads need, and a later one that gets budgets by it."""

import json
from dataclasses import replace

import grpc
from click.testing import CliRunner
from support.processes import ManagerProcess, wait_for
from support.tiny_models import random_tokens
from support.tiny_worker import collect, request, settings, tiny_loaded

from scissorhands.profile import Profile
from scissorhands.v1 import budget_pb2, generation_pb2_grpc
from scissorhands_client import AsyncManagerClient, BudgetSource
from scissorhands_client.commands.budgets import budgets
from scissorhands_client.commands.sessions import sessions
from scissorhands_server.worker.server import Worker

NOWHERE = "redis://127.0.0.1:1/0"
SLOTS, NEW = 64, 60


async def answer(seed, profile=None, **given):
    """Return an answer's tokens, its grant and its session."""
    async with (
        Worker(settings(**given), replace(tiny_loaded(), profile=profile)) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        message = request(random_tokens(90, seed=seed).tolist(), slots=SLOTS, policy="scissorhands", new=NEW)
        events = aiter(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message))
        accepted = (await anext(events)).accepted
        tokens, _, _ = await collect(events)
        return tokens, accepted.grant, accepted.session_id


async def test_sessions_teach_the_manager(tmp_path):
    with ManagerProcess(store_url=NOWHERE, budgets="measured", budgets_renewal=5) as manager:
        early = CliRunner().invoke(budgets, ["--manager", manager.address])
        assert (early.exit_code, early.stderr) == (1, "Error: model: nothing was measured of any model yet\n")
        _, first, _ = await answer(1, manager=manager.address)
        assert (first.by_head, first.budget_source) == (False, budget_pb2.BUDGET_SOURCE_EQUAL)
        for seed in range(2, 6):
            if manager.metric("compared_snapshots_total") < 5:
                await answer(seed, manager=manager.address)
        wait_for(lambda: manager.metric("compared_snapshots_total") >= 5, "snapshots to be compared")

        # The last answer's snapshots may still be looked at when its session has ended: until then profiles change.
        counts = []
        wait_for(lambda: counts.append(manager.metric("compared_snapshots_total")) or len(counts) > 9, "it to settle")
        path = tmp_path / "measured.json"
        shown = CliRunner().invoke(budgets, ["--manager", manager.address, "--out", str(path)])
        assert (shown.exit_code, "tiny" in shown.output) == (0, True), shown.output
        profile = Profile.load(path)
        async with AsyncManagerClient(manager.address) as client:
            measured = await client.measured_profile("tiny")
            assert (measured.model, measured.layers, measured.kv_heads) == (profile.model, 2, 2)

            tokens, granted, session_id = await answer(9, manager=manager.address)
            assert granted.budget_source == budget_pb2.BUDGET_SOURCE_MEASURED
            assert min(granted.layer_slots) < SLOTS < max(granted.layer_slots)
            assert sum(granted.layer_slots) <= 4 * SLOTS
            assert (await client.get_session(session_id)).grant.budget_source is BudgetSource.MEASURED
        told = CliRunner().invoke(sessions, ["show", session_id, "--manager", manager.address], env={"COLUMNS": "200"})
        assert "heads share by what the manager measured" in told.output

    alone, local, _ = await answer(9, profile)
    assert (local.by_head, local.budget_source) == (True, budget_pb2.BUDGET_SOURCE_PROFILE)
    assert list(local.layer_slots) == list(granted.layer_slots)
    assert alone == tokens
    assert json.loads(path.read_text())["about"]["command"] == "budgets"
