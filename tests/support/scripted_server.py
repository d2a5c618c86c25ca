"""Serves a scripted servicer on a real port, behind the servers' own status table and health."""

import asyncio
import threading
from contextlib import contextmanager

from scissorhands_server.hosting import GrpcHost
from scissorhands_server.status import StatusInterceptor


class ScriptedServer:
    """What tests see of it: the script, the address and its health."""

    def __init__(self, script, loop, host, address):
        self.script = script
        self.address = address
        self._loop = loop
        self._host = host

    def set_serving(self, serving):
        asyncio.run_coroutine_threadsafe(self._host.set_serving(serving), self._loop).result(10)


@contextmanager
def scripted_server(service, add, script, port=0):
    """Serve from a thread with an event loop of its own, as the tests' own loops come and go."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin():
        host = GrpcHost([service], [StatusInterceptor((service,))])
        add(script, host.server)
        bound = host.bind("127.0.0.1", port)
        await host.start()
        return host, f"127.0.0.1:{bound}"

    host, address = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield ScriptedServer(script, loop, host, address)
    finally:
        asyncio.run_coroutine_threadsafe(host.stop(0), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
