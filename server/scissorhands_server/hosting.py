"""What both servers share: a gRPC server with health and reflection, a metrics endpoint, signals and logging."""

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

from scissorhands.errors import ConfigurationError
from scissorhands_server.tls import ServerCertificate

LOGGER = logging.getLogger(__name__)

# The protocol promises that nothing needs more than gRPC's own default.
MAX_MESSAGE_BYTES = 4 << 20
# Status details travel in trailers; grpc's default of 8 KiB leaves little room beside them.
MAX_METADATA_BYTES = 16 << 10

SERVING = health_pb2.HealthCheckResponse.SERVING
# A bound on what must end by itself before calls that go on are cut off, and how long those then have to tell their
# clients what became of them.
_DRAIN_SECONDS = 60.0
_LAST_WORDS_SECONDS = 2.0

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcHost:
    """A gRPC server with standard health and reflection.

    The owner adds its servicers to :attr:`server`, binds, starts, and reports health by :meth:`set_serving`.

    Args:
        services: Full names of the services, for reflection and health.
        interceptors: Server interceptors, outermost first.
        max_concurrent_calls: Calls in progress at once, health and reflection included; more are refused.
        with_reflection: Whether callers may ask which methods there are.
        connection_seconds: How long a connection gets new calls, about; then its client connects anew, and looks up
            the name for that, so it finds servers that were added. Calls in progress go on.
    """

    def __init__(
        self,
        services: Sequence[str],
        interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
        max_concurrent_calls: int = 1024,
        *,
        with_reflection: bool = True,
        connection_seconds: float = 60.0,
    ) -> None:
        self.services = tuple(services)
        options = [*_server_options(), ("grpc.max_connection_age_ms", round(connection_seconds * 1000))]
        self.server: grpc.aio.Server = grpc.aio.server(
            interceptors=tuple(interceptors), options=options, maximum_concurrent_rpcs=max_concurrent_calls
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # Its stubs lack it.
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        if with_reflection:
            names = (*self.services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.server)

    def bind(self, host: str, port: int, certificate: ServerCertificate | None = None) -> int:
        """Listen on ``host:port`` (0: any free port) and return the port.

        Args:
            host: Address to listen on.
            port: Port to listen on.
            certificate: What is shown to clients; None serves without TLS.

        Raises:
            ConfigurationError: The address is taken or not ours.
        """
        where = address(host, port)
        try:
            if certificate is None:
                bound: int = self.server.add_insecure_port(where)
            else:
                bound = self.server.add_secure_port(where, certificate.credentials())
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on {where}: {error}") from error
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Report the health of every service and of the server as a whole (the empty name)."""
        for service in ("", *self.services):
            await self._health.set(service, SERVING if serving else NOT_SERVING)

    async def start(self, *, serving: bool = True) -> None:
        """Accept calls, reporting ``serving`` as health."""
        await self.set_serving(serving)
        await self.server.start()

    async def stop(self, grace: float) -> None:
        """Refuse new calls, report that we are going, and cancel what still runs after ``grace`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace)


class MetricsEndpoint:
    """Serves a registry at ``http://host:port/metrics`` from a thread of its own.

    Args:
        registry: What is served.
        host: Address to listen on.
        port: Port to listen on; 0 takes any free one.

    Raises:
        ConfigurationError: The address is taken or not ours.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        # The times at which series were made are of no use and look like series that are not at zero.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        try:
            self._server, self._thread = _start_http(registry, host, port)
        except OSError as error:
            raise ConfigurationError(f"cannot serve metrics on {address(host, port)}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def watch_signals(stop: Callable[[], object]) -> None:
    """Call ``stop`` on the running event loop whenever SIGTERM or SIGINT arrives."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


class StopSignals:
    """Catches SIGTERM and SIGINT from the moment it is made, on the running event loop.

    Made before anyone is told that the server is ready: a signal sent right afterwards must stop it in order too.
    """

    def __init__(self) -> None:
        self._asked = [asyncio.Event(), asyncio.Event()]
        watch_signals(self._ask)

    async def run(self, host: GrpcHost, grace: float, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait for a signal, then refuse new calls, and stop when those in progress have ended.

        Args:
            host: What is stopped.
            grace: How long calls may go on, in seconds. A second signal ends it.
            drain: Ends what then still runs in a way that its clients can go on from; must end by itself.
        """
        first, second = self._asked
        await first.wait()
        LOGGER.info("stopping within %g s", grace)
        stopping = asyncio.create_task(host.stop(grace + _DRAIN_SECONDS))
        hurry = asyncio.create_task(second.wait())
        await asyncio.wait({stopping, hurry}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            if drain is not None:
                await drain()
            await host.stop(_LAST_WORDS_SECONDS if drain else 0)
        await stopping

    def _ask(self) -> None:
        first, second = self._asked
        (second if first.is_set() else first).set()


def configure_logging(level: str = "INFO") -> None:
    """Log plain lines to standard error.

    Raises:
        ConfigurationError: There is no such level.
    """
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigurationError(f"log_level: must be debug, info, warning or error, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _server_options() -> list[tuple[str, int]]:
    return [
        # Without this, a second server on the same port would silently share its calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # Find clients that vanished without a word, and let ours look for us the same way.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def _start_http(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    return start_http_server(port, addr=host, registry=registry)
