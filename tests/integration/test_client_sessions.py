"""The clients of the manager and ``scissorhands sessions`` against a real gRPC server."""

import json

import pytest
from click.testing import CliRunner
from support.scripted_manager import scripted_manager

from scissorhands_client import (
    AsyncManagerClient,
    ManagerClient,
    NotFoundError,
    SegmentInfo,
    SessionState,
    SuspendedRow,
)
from scissorhands_client.commands.sessions import sessions


@pytest.fixture(scope="module")
def manager():
    with scripted_manager() as server:
        yield server


def run(manager, *arguments):
    return CliRunner().invoke(sessions, [*arguments, "--manager", manager.address], env={"COLUMNS": "120"})


async def test_pages_follow_each_other(manager):
    manager.script.page_sizes.clear()
    with ManagerClient(manager.address) as client:
        found = list(client.list_sessions(page_size=2))
    assert [each.session_id for each in found] == [f"session-{number}" for number in (4, 3, 2, 1, 0)]
    assert manager.script.page_sizes == [2, 2, 2]
    async with AsyncManagerClient(manager.address) as other:
        assert [each async for each in other.list_sessions(page_size=2)] == found


def test_only_one_state(manager):
    with ManagerClient(manager.address) as client:
        found = list(client.list_sessions(SessionState.OPEN))
    assert [each.session_id for each in found] == ["session-3", "session-1"]
    assert {each.state for each in found} == {SessionState.OPEN}


async def test_one_session(manager):
    with ManagerClient(manager.address) as client:
        found = client.get_session("session-2")
        assert found.segments == (SegmentInfo(0, 64, 617, 5_000),)
        assert found.suspended == SuspendedRow(2_015, 7_000_000)
        assert next(client.list_sessions()).suspended is None
        with pytest.raises(NotFoundError) as raised:
            client.get_session("session-9")
    assert raised.value.field == "session_id"
    async with AsyncManagerClient(manager.address) as other:
        assert await other.get_session("session-2") == found
        with pytest.raises(NotFoundError):
            await other.get_session("session-9")


def test_list_command(manager):
    result = run(manager, "list", "--limit", "3")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines() if "session-" in line] == [
        "session-4",
        "session-3",
        "session-2",
    ]


def test_list_command_prints_json(manager):
    result = run(manager, "list", "--state", "closed", "--json")
    found = json.loads(result.stdout)
    assert [each["session_id"] for each in found] == ["session-4", "session-2", "session-0"]
    assert found[0]["state"] == "closed"
    assert found[0]["open_time"] == "2023-11-14T22:13:24+00:00"
    assert found[0]["budget"] == {"unit": "fraction", "amount": 0.2}


def test_show_command(manager):
    result = run(manager, "show", "session-1")
    assert result.exit_code == 0
    for expected in (
        "[tiny]",
        "20 to 22 slots",
        "h2o:default",
        "12.50%",
        "75.00% on average",
        "1,234 slots",
        "617",
        "80% (50%",
        "not compared",
    ):
        assert expected in result.stdout
    assert json.loads(run(manager, "show", "session-1", "--json").stdout)["segments"][0]["size_bytes"] == 5_000
    assert json.loads(run(manager, "show", "session-1", "--json").stdout)["quality"]["shadow"] == "late"


def test_an_unknown_session_is_one_line(manager):
    result = run(manager, "show", "nowhere")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "Error: session_id: no session 'nowhere'\n"


def test_a_malformed_address():
    result = CliRunner().invoke(sessions, ["list", "--manager", "localhost"])
    assert result.exit_code == 2
    assert result.stderr == "Error: address: must be HOST:PORT, got 'localhost'\n"


async def test_deleting_a_session(manager):
    manager.script.deleted.clear()
    with ManagerClient(manager.address) as client:
        assert client.delete_session("a") == 1234
    async with AsyncManagerClient(manager.address) as other:
        assert await other.delete_session("b") == 1234
    assert run(manager, "delete", "c").stdout == "1,234 values deleted\n"
    assert json.loads(run(manager, "delete", "d", "--json").stdout) == {"session_id": "d", "deleted": 1234}
    assert manager.script.deleted == ["a", "b", "c", "d"]
    assert "2,015 tokens in the store, 7.0 MB" in run(manager, "show", "session-1").stdout
