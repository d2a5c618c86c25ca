"""The whole system as a user starts it, and what becomes of an answer when a part of it is lost."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
from support.system import descendants, listening_sockets, running_system
from support.tiny_worker import metrics, tiny_folder

from scissorhands_client import Budget, Client, Delta, Finish, GenerateOptions, GrantSource, ManagerClient, TokenIds

PROMPT = TokenIds(tuple(3 + (7 * index) % 240 for index in range(100)))
OPTIONS = GenerateOptions(max_new_tokens=300, budget=Budget.tokens(40), ignore_eos=True)
FOUND_SECONDS = 60


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("system"), tiny_folder(), "--stop-timeout", "20") as running:
        yield running


@contextmanager
def client_of(system):
    with Client(system.address("worker"), timeout=120) as client:
        yield client


def answer(system, disturb=None):
    """Return the tokens and the last event; ``disturb`` is called after the tenth token."""
    tokens, finish = [], None
    with client_of(system) as client, client.generate(PROMPT, OPTIONS) as stream:
        for event in stream:
            if isinstance(event, Delta):
                tokens += event.token_ids
                if len(tokens) == 10 and disturb is not None:
                    disturb()
            elif isinstance(event, Finish):
                finish = event
    assert finish is not None
    return tokens, finish.cache


def worker_metrics(system):
    return metrics(int(system.state["worker"]["metrics"].removesuffix("/metrics").rpartition(":")[2]))


def manager_metrics(system):
    return metrics(int(system.state["manager"]["metrics"].removesuffix("/metrics").rpartition(":")[2]))


def wait_until(condition, what):
    deadline = time.monotonic() + FOUND_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(system):
    tokens, cache = answer(system)
    assert len(tokens) == 300
    assert cache.plans_manager >= 1
    assert cache.segments == cache.evictions > 10
    return tokens


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("part", ["manager", "store"])
def test_a_part_lost_in_the_middle_changes_no_token_and_is_found_again(system, undisturbed, part, number):
    lost = system.pid(part)
    tokens, _ = answer(system, lambda: os.kill(lost, number))
    assert tokens == undisturbed
    if number == signal.SIGSTOP:
        os.kill(lost, signal.SIGCONT)
    wait_until(lambda: worker_metrics(system)["scissorhands_worker_manager_up"] == 1, "the manager")
    wait_until(lambda: manager_metrics(system)["scissorhands_manager_store_up"] == 1, "the store")
    stored = manager_metrics(system)["scissorhands_manager_segments_stored_total"]
    tokens, cache = answer(system)
    assert tokens == undisturbed
    assert cache.plans_manager >= 1
    wait_until(
        lambda: manager_metrics(system)["scissorhands_manager_segments_stored_total"] >= stored + cache.segments,
        "the segments of the answer after it",
    )


def test_without_a_manager_the_default_budget_is_the_workers_and_marked_so(system, undisturbed):
    del undisturbed
    os.kill(system.pid("manager"), signal.SIGSTOP)
    try:
        wait_until(lambda: worker_metrics(system)["scissorhands_worker_manager_up"] == 0, "the loss of the manager")
        with client_of(system) as client:
            result = client.generate(PROMPT, GenerateOptions(max_new_tokens=100, ignore_eos=True)).result()
    finally:
        os.kill(system.pid("manager"), signal.SIGCONT)
    assert result.accepted.grant.source is GrantSource.LOCAL
    assert set(result.accepted.grant.layer_slots) == {40}
    wait_until(lambda: worker_metrics(system)["scissorhands_worker_manager_up"] == 1, "the manager")


def test_sessions_tell_what_they_hold(system, undisturbed):
    del undisturbed
    with client_of(system) as client:
        result = client.generate(PROMPT, OPTIONS).result()
    with ManagerClient(system.address("manager")) as manager:
        wait_until(
            lambda: manager.get_session(result.accepted.session_id).segment_count == result.finish.cache.segments,
            "the segments",
        )
        session = manager.get_session(result.accepted.session_id)
        listed = {other.session_id for other in manager.list_sessions()}
    assert session.segment_bytes == result.finish.cache.segment_bytes
    assert sum(segment.slots for segment in session.segments) == result.finish.cache.evicted_slots
    assert session.session_id in listed


def test_stopping_leaves_no_process_and_no_port(tmp_path):
    with running_system(tmp_path, tiny_folder()) as running:
        ports, children = running.ports(), descendants(running.process)
        assert len(children) >= 3
        sockets = listening_sockets(ports)
        assert len(sockets) >= len(ports)
        answer(running)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
    assert not any(child.is_running() for child in children)
    assert not sockets & listening_sockets(ports)
    assert not (tmp_path / "state.json").exists()
