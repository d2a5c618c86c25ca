"""``scissorhands top``: from real metrics endpoints to numbers, tables and JSON."""

import json
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from support.processes import free_port

from scissorhands.errors import UnavailableError
from scissorhands_server.hosting import MetricsEndpoint
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.top.command import top
from scissorhands_server.top.look import Servers, Silent
from scissorhands_server.top.scrape import Scrape, scrape
from scissorhands_server.top.states import Between, manager_state, worker_state
from scissorhands_server.worker.metrics import WorkerMetrics


@contextmanager
def served(registry):
    with MetricsEndpoint(registry, "127.0.0.1", 0) as endpoint:
        yield f"127.0.0.1:{endpoint.port}"


@pytest.fixture
def worker():
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "tiny", 4, 64)
    with served(registry) as address:
        yield metrics, address


@pytest.fixture
def manager():
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    with served(registry) as address:
        yield metrics, address


def test_a_worker_that_has_done_nothing_yet(worker):
    _, address = worker
    (state,) = Servers([address], worker_state).look()
    assert (state.model, state.rows_capacity, state.rows) == ("tiny", 4, 0)
    assert (state.generated, state.compression, state.remote_share, state.hit_share) == (0, None, None, None)
    assert not state.manager_up


def test_a_worker_between_two_looks(worker):
    metrics, address = worker
    metrics.generated_tokens.inc(1000)
    metrics.plans.labels("manager", "decode").inc(50)
    before = scrape(address)
    metrics.generated_tokens.inc(30)
    metrics.prompt_tokens.inc(100)
    metrics.plans.labels("manager", "decode").inc(6)
    metrics.plans.labels("local", "prefill").inc(2)
    metrics.evictions.labels("h2o", "decode").inc(8)
    metrics.prefix.lookups.labels("hit").inc(3)
    metrics.prefix.lookups.labels("new").inc(2)
    metrics.suspension.resumes.labels("resumed").inc(1)
    metrics.suspension.resumes.labels("late").inc(2)
    metrics.rows.set(3)
    metrics.queued.set(2)
    metrics.cache_slots.set(80)
    metrics.budget_slots.set(120)
    metrics.allocated.set(1000)
    metrics.full_16bit.set(5500)
    metrics.manager_up.set(1)
    state = worker_state("w", before, Scrape(before.at + 10, scrape(address).samples))
    assert (state.generated, state.read, state.evictions) == (3, 10, pytest.approx(0.8))
    assert state.remote_share == 0.75
    assert state.hit_share == 0.5
    assert state.compression == 5.5
    assert (state.rows, state.queued, state.slots, state.budget_slots, state.manager_up) == (3, 2, 80, 120, True)


def test_a_manager_between_two_looks(manager):
    metrics, address = manager
    metrics.plan_compute.observe(5)
    before = scrape(address)
    metrics.sessions.labels("open").set(7)
    metrics.plans.labels("computed").inc(20)
    metrics.plans.labels("refused").inc(3)
    metrics.plans_shed.labels("bound").inc(10)
    metrics.plan_compute.observe(0.002)
    metrics.plan_compute.observe(0.004)
    metrics.space.objects.labels("row").set(2)
    metrics.space.objects.labels("prefix").set(3)
    metrics.space.size.labels("row").set(4096)
    metrics.store_up.set(1)
    state = manager_state("m", before, Scrape(before.at + 10, scrape(address).samples))
    assert (state.sessions, state.plans, state.shed) == (7, 2, 1)
    assert state.plan_seconds == pytest.approx(0.003)
    assert (state.stored_objects, state.stored_bytes, state.store_up) == (5, 4096, True)


def test_a_counter_that_fell_began_anew():
    series = ("x_total", frozenset())
    between = Between(Scrape(0, {series: 100.0}), Scrape(2, {series: 10.0}), "")
    assert between.grown("x_total") == 10
    assert between.rate("x_total") == 5


def test_a_server_that_does_not_answer_is_shown_as_such_and_others_go_on(worker):
    _, address = worker
    gone = f"127.0.0.1:{free_port()}"
    first, second = Servers([gone, address], worker_state).look()
    assert isinstance(first, Silent)
    assert first.endpoint == gone
    assert "refused" in first.why
    assert second.model == "tiny"


def test_what_is_no_metrics_is_refused(tmp_path):
    with pytest.raises(UnavailableError, match="does not answer with metrics"):
        scrape((tmp_path / "none").as_uri())


def test_json_has_all_states_and_the_exit_status_tells_of_silent_servers(worker, manager):
    words = ["--once", "--interval", "0.1", "--json", "--worker", worker[1], "--manager", manager[1]]
    finished = CliRunner().invoke(top, words)
    assert finished.exit_code == 0, finished.output
    told = json.loads(finished.output)
    assert [state["endpoint"] for state in (*told["workers"], *told["managers"])] == [worker[1], manager[1]]
    gone = f"127.0.0.1:{free_port()}"
    finished = CliRunner().invoke(top, [*words, "--worker", gone])
    assert finished.exit_code == 1
    assert json.loads(finished.output)["workers"][1]["endpoint"] == gone


def test_tables_show_every_server(worker, manager):
    metrics, _ = worker
    metrics.allocated.set(2_000_000)
    metrics.full_16bit.set(10_000_000)
    gone = f"127.0.0.1:{free_port()}"
    words = ["--once", "--interval", "0.1", "--worker", worker[1], "--manager", manager[1], "--manager", gone]
    finished = CliRunner().invoke(top, words)
    assert finished.exit_code == 1
    for shown in (worker[1], manager[1], gone, "tiny", "2.0 MB", "5.0x", "does not answer"):
        assert shown in finished.output
