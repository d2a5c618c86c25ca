"""The manager's composition: settings, store, ledger, services, servers."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from scissorhands.ledger import Ledger, LedgerLimits
from scissorhands.v1 import cache_manager_pb2_grpc
from scissorhands_server.heap import keep_large_blocks
from scissorhands_server.hosting import GrpcHost, MetricsEndpoint, StopSignals, address, configure_logging
from scissorhands_server.manager.admission import Admission
from scissorhands_server.manager.care import Care
from scissorhands_server.manager.janitor import Janitor
from scissorhands_server.manager.listing import Listing
from scissorhands_server.manager.metrics import SERVICE, ManagerMetrics
from scissorhands_server.manager.planning import Planning
from scissorhands_server.manager.prefixes import Prefixes
from scissorhands_server.manager.recalls import Recalls
from scissorhands_server.manager.segments import Segments
from scissorhands_server.manager.servicer import CacheManagerServicer
from scissorhands_server.manager.sessions import Sessions
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.space import Space
from scissorhands_server.manager.stored import StoredSegments
from scissorhands_server.manager.stored_prefixes import StoredPrefixes
from scissorhands_server.manager.suspended_rows import SuspendedRows
from scissorhands_server.manager.suspension import Suspension
from scissorhands_server.manager.upkeep import Upkeep
from scissorhands_server.row_messages import RowMessages
from scissorhands_server.status import StatusInterceptor
from scissorhands_server.store.address import Kind, StoreAddress
from scissorhands_server.store.base import PageStore
from scissorhands_server.store.breaker import CLUSTER_TRIPPING, TRIPPING, BreakerStore
from scissorhands_server.store.deadline import DeadlineStore
from scissorhands_server.store.embedded import EmbeddedStore
from scissorhands_server.store.metered import MeteredStore
from scissorhands_server.store.redis import RedisStore
from scissorhands_server.store.registry import Registry
from scissorhands_server.tenants import Role, TokenInterceptor, Tokens
from scissorhands_server.tls import ServerCertificate, TlsMetrics

LOGGER = logging.getLogger(__name__)

# Who may call what else than workers do, where there are tokens: operators all, clients what is of their own tenant.
ROLES_OF_METHODS: dict[str, tuple[Role, ...]] = {
    **dict.fromkeys(("PauseSession", "UnpauseSession", "GetStore", "CollectGarbage", "VerifyStore"), ()),
    **dict.fromkeys(("GetSession", "ListSessions", "FetchSegments"), ("worker", "client")),
    "DeleteSession": ("client",),
}
# Rows of suspended sessions and of prefixes that are on their way at once; more are asked to come again.
_MAX_STREAMS = 1024
_RETRY_SECONDS = 0.5


async def serve(settings: ManagerSettings, announce: Callable[[str], None]) -> None:
    """Run a manager until SIGTERM or SIGINT.

    Args:
        settings: Its settings.
        announce: Told, line by line, what whoever started it must know.

    Raises:
        ConfigurationError: An address is taken, a certificate cannot be used, or the embedded store does not start.
    """
    configure_logging(settings.log_level)
    keep_large_blocks()
    async with AsyncExitStack() as stack:
        url = settings.store_url
        if not url:
            embedded = EmbeddedStore(settings.embedded_store_bytes)
            await embedded.start()
            stack.push_async_callback(embedded.stop)
            url = embedded.url
            announce(f"no --store-url was given: started an embedded store at {url}")
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        host = await stack.enter_async_context(_manager(settings, url, registry))
        tls_metrics = TlsMetrics(registry, "manager")
        certificate = ServerCertificate(settings.tls, tls_metrics) if settings.tls else None
        port = host.bind(settings.host, settings.port, certificate)
        metrics_host = settings.metrics_host or settings.host
        endpoint = stack.enter_context(MetricsEndpoint(registry, metrics_host, settings.metrics_port))
        announce(f"metrics on http://{address(metrics_host, endpoint.port)}/metrics")
        signals = StopSignals()
        await host.start()
        announce(f"manager ready on {address(settings.host, port)}")
        await signals.run(host, settings.grace)


@asynccontextmanager
async def _manager(settings: ManagerSettings, store_url: str, registry: CollectorRegistry) -> AsyncIterator[GrpcHost]:
    """Assemble a manager that only needs to be bound and started; free what it holds at the end."""
    clock = time.monotonic
    metrics = ManagerMetrics(registry)
    store = _store(settings, store_url, metrics)
    limits = LedgerLimits(
        settings.max_sessions, settings.lease, settings.retention, settings.attention_bytes, settings.budgets_renewal
    )
    ledger = Ledger(limits, clock)
    sessions = Sessions(ledger, settings, metrics)
    planning = Planning(sessions, ledger, settings, metrics)
    stored = StoredSegments(store, settings.segment_ttl)
    rows = SuspendedRows(store, settings.suspend_ttl, settings.lease)
    space = Space(Registry(store), settings.space_limits, metrics)
    stored_prefixes = StoredPrefixes(store, settings.prefix_ttl)
    for keeper in (stored, rows, stored_prefixes):
        space.add_keeper(keeper)
    segments = Segments(stored, space, sessions, ledger, settings, metrics, clock)
    streams = Admission("rows on their way", _MAX_STREAMS, settings.suspend_memory_bytes, _RETRY_SECONDS)
    suspension = Suspension(rows, space, settings, metrics, streams)
    prefixes = Prefixes(stored_prefixes, space, settings, metrics, streams)
    recalls = Recalls(stored, settings, metrics)
    janitor = Janitor(store, space, metrics)
    upkeep = Upkeep(store, ledger, segments, janitor, settings.janitor_interval, metrics)
    interceptors: list[Any] = [StatusInterceptor((SERVICE.full_name,), metrics.call_ended), RowMessages()]
    if settings.tokens_file is not None:
        interceptors.insert(1, TokenInterceptor(Tokens(settings.tokens_file), ["worker"], ROLES_OF_METHODS))
    host = GrpcHost([SERVICE.full_name], interceptors, with_reflection=settings.reflection)
    wall_offset = time.time() - clock()
    care, listing = Care(store, space, rows, janitor), Listing(sessions, space, wall_offset)
    servicer = CacheManagerServicer(
        sessions, planning, segments, suspension, prefixes, recalls, care, listing, wall_offset
    )
    cache_manager_pb2_grpc.add_CacheManagerServiceServicer_to_server(servicer, host.server)
    upkeep.start()
    try:
        yield host
    finally:
        await upkeep.close()
        await planning.close()
        await store.close()


def _store(settings: ManagerSettings, url: str, metrics: ManagerMetrics) -> PageStore:
    """Wrap the store in deadlines, then measures, then the breaker, whose refusals are no calls and not measured."""
    redis = RedisStore(url, settings.store_timeout, settings.store_connections, settings.store_access)
    within_deadline = DeadlineStore(redis, settings.store_timeout)
    metered = MeteredStore(within_deadline, metrics.store_operation, metrics.store_errors)
    clustered = StoreAddress.parse(url).kind is Kind.CLUSTER
    breaker = BreakerStore(metered, tripping=CLUSTER_TRIPPING if clustered else TRIPPING)
    metrics.store_breaker_open.set_function(lambda: breaker.is_open)
    return breaker
