"""A manager in this process, so that what it does can be changed and timed."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from scissorhands_server.manager import server
from scissorhands_server.manager.settings import ManagerSettings


@asynccontextmanager
async def manager_here(redis):
    """Run a manager on a store; what is yielded has its address."""
    chosen = ManagerSettings(port=0, metrics_port=0, store_url=redis.url)
    async with server._manager(chosen, redis.url, CollectorRegistry()) as host:
        address = f"127.0.0.1:{host.bind('127.0.0.1', 0)}"
        await host.start()
        try:
            yield SimpleNamespace(address=address)
        finally:
            await host.stop(0)
