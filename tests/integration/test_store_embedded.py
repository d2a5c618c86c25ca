"""The embedded store: it belongs to its manager, lives as long, and is nobody else's business."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.manager_data import fetch, offload, opened, segment, spec
from support.processes import ManagerProcess, wait_for

from scissorhands_server.store.embedded import EmbeddedStore


def children(pid):
    return [child for child in psutil.Process(pid).children(recursive=True) if child.name() == "valkey-server"]


def ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_the_embedded_store_ends_with_its_manager(start_manager, how):
    manager = start_manager()
    assert any("started an embedded store" in line and "--store-url" in line for line in manager.lines)
    (valkey,) = children(manager.pid)
    getattr(manager, how)()
    wait_for(lambda: ended(valkey), "the embedded store to end")


async def test_the_embedded_store_is_started_again_when_it_dies(start_manager, connect):
    manager = start_manager()
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        wait_for(lambda: manager.metric("store_up") == 1, "the store")
        data = segment(session)
        assert (await offload(stub, session, (0, data))).stored == 1
        (valkey,) = children(manager.pid)
        valkey.kill()
        wait_for(lambda: [child for child in children(manager.pid) if child.pid != valkey.pid], "a new store")
        while not (await offload(stub, session, (0, data))).stored:
            await asyncio.sleep(0.05)
        assert await fetch(stub, "s1") == {0: data}


def test_the_embedded_store_listens_on_no_port_and_only_for_its_user(start_manager):
    manager = start_manager()
    (valkey,) = children(manager.pid)
    assert [c for c in valkey.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN] == []
    (path,) = {c.laddr for c in valkey.net_connections(kind="unix") if c.laddr.endswith("valkey.sock")}
    socket = Path(path)
    assert socket.stat().st_mode & 0o077 == 0
    assert socket.parent.stat().st_mode & 0o077 == 0
    manager.terminate()
    assert not socket.parent.exists()


def test_an_interrupt_at_the_terminal_ends_both_in_order():
    """Ctrl-C reaches every process of the group at once; the store must not go before the manager does."""
    process = ManagerProcess()
    try:
        (valkey,) = children(process.pid)
        assert os.getpgid(valkey.pid) != os.getpgid(process.pid)
        os.kill(process.pid, signal.SIGINT)
        wait_for(lambda: ended(psutil.Process(process.pid)) if psutil.pid_exists(process.pid) else True, "the end")
        wait_for(lambda: ended(valkey), "the store to end")
    finally:
        process.stop()


async def test_an_embedded_store_that_cannot_start_says_why():
    code = (
        "import asyncio, socket\n"
        "from scissorhands_server.store.embedded import EmbeddedStore\n"
        "with socket.create_server(('127.0.0.1', 0)) as taken:\n"
        "    asyncio.run(EmbeddedStore(1 << 24, port=taken.getsockname()[1]).start())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigurationError: the embedded store did not start" in done.stderr
    assert "in use" in done.stderr


async def test_an_embedded_store_on_a_port(redis_server):
    redis_server.kill()
    server = EmbeddedStore(16 << 20, port=redis_server.port)
    await server.start()
    try:
        assert redis_server.command("PING") == b"+PONG\r\n"
        assert server.pid > 0
    finally:
        await server.stop()
        await server.stop()
    assert server.pid == 0


async def test_the_next_store_deletes_the_folder_of_a_killed_owner(start_manager):
    manager = start_manager()
    folder = Path(next(line for line in manager.lines if "unix://" in line).partition("unix://")[2]).parent
    manager.kill()
    assert folder.is_dir()
    living = EmbeddedStore(32 << 20)
    await living.start()
    assert not folder.exists()
    other = EmbeddedStore(32 << 20)
    await other.start()
    await other.stop()
    assert Path(living.url.removeprefix("unix://")).parent.is_dir()
    await living.stop()
