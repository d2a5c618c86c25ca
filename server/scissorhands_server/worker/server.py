"""The worker process: settings become a model, a cache, an engine, a link and a gRPC server."""

import asyncio
import logging
import secrets
from functools import partial
from typing import Any, Self

import click
import torch
from prometheus_client import CollectorRegistry, ProcessCollector

from scissorhands.cache import ResidentCache
from scissorhands.probe import probe
from scissorhands.step import ModelStep
from scissorhands.v1 import generation_pb2, generation_pb2_grpc
from scissorhands.wire import model_shape
from scissorhands_server.heap import keep_large_blocks
from scissorhands_server.hosting import GrpcHost, MetricsEndpoint, StopSignals, address, configure_logging
from scissorhands_server.status import StatusInterceptor
from scissorhands_server.tenants import TokenInterceptor, Tokens
from scissorhands_server.tls import ServerCertificate, TlsMetrics
from scissorhands_server.worker.engine import Engine
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.loading import LoadedModel, load
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.offload import Offloader
from scissorhands_server.worker.parking import Parking
from scissorhands_server.worker.planner import RemotePlanner
from scissorhands_server.worker.prefixes import Prefixes
from scissorhands_server.worker.recall_source import RecallSource
from scissorhands_server.worker.recalls import Recalls
from scissorhands_server.worker.scheduler import Limits
from scissorhands_server.worker.service import GenerationHost
from scissorhands_server.worker.servicer import GenerationServicer
from scissorhands_server.worker.settings import WorkerSettings
from scissorhands_server.worker.shadows import ShadowLimits, Shadows
from scissorhands_server.worker.suspension import Suspension
from scissorhands_server.worker.task import Task
from scissorhands_server.worker.uploader import Uploader

LOGGER = logging.getLogger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
STOP_SECONDS = 5.0
# Calls in progress beside those that have a row or a place in the queue: health checks, and requests to be refused.
OTHER_CALLS = 1024


def run(settings: WorkerSettings) -> None:
    """Load the model and serve it until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: A setting cannot be used, or there is no such model.
        UnsupportedModelError: The model would not be served rightly.
    """
    configure_logging(settings.log_level)
    torch.set_num_threads(settings.threads)
    keep_large_blocks()
    loaded = load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        cache_folder=settings.cache_folder.expanduser(),
        name=settings.model_name,
        profile=settings.profile,
        progress=lambda text: LOGGER.info("loading: %s", text),
    )
    LOGGER.info("loading: probing the attention of %s", loaded.info.architecture)
    probe(loaded.model)
    asyncio.run(_serve(settings, loaded))


class Worker:
    """A worker in this process: use it as an async context manager.

    Args:
        settings: Its settings.
        loaded: Its model, probed.

    Attributes:
        host: The gRPC server.
        port: The port that it listens on.
        metrics_port: The port of the metrics endpoint.
    """

    def __init__(self, settings: WorkerSettings, loaded: LoadedModel) -> None:
        self._settings = settings
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        metrics = WorkerMetrics(registry, loaded.info.name, settings.most_rows, settings.queue)
        self._loop = loop = asyncio.get_running_loop()
        self._link = None
        if settings.manager:
            self._link = ManagerLink(settings.manager, metrics, settings.manager_deadline, settings.manager_credentials)
        self._uploader = Uploader(self._link, loop, settings.staging_bytes) if self._link else None
        planner = RemotePlanner(self._link, loop) if self._link else None
        model = loaded.model
        new_cache = partial(
            ResidentCache, model_shape(loaded.info), model.dtype, model.device, planner, loaded.statistics
        )
        limits = ShadowLimits(settings.shadow_bytes, settings.shadow_load, settings.shadow_patience)
        offloader = Offloader(loaded, self._uploader, metrics) if self._uploader else None
        source = (
            RecallSource(loaded.info, self._link, self._uploader, loop, settings.recall_deadline, settings.recall_bytes)
            if self._link and self._uploader
            else None
        )
        memory = Memory(settings.suspend_bytes, metrics.suspension.held.set)
        self._engine = Engine(
            loaded,
            new_cache,
            planner,
            offloader,
            Recalls(ModelStep(model), source, offloader, metrics.recall, settings.recall_deadline),
            Shadows(ModelStep(model), new_cache, loaded.info.vocabulary, metrics, limits),
            Parking(memory, metrics.parking),
            metrics,
            limits=Limits(settings.most_rows, settings.queue, settings.cache_bytes, settings.priority_aging),
            step_tokens=settings.tokens_of_step(model.device.type),
            plan_deadline=settings.plan_deadline,
            ended=self._ended,
        )
        self._suspension, self._prefixes = None, None
        if self._link and self._uploader and settings.suspend_bytes:
            self._suspension = Suspension(loaded, self._link, self._uploader, settings, memory)
            self._prefixes = Prefixes(loaded, self._link, settings, memory) if settings.prefix_tokens else None
        worker_id = settings.worker_id or secrets.token_hex(6)
        generation = GenerationHost(
            loaded, self._engine, self._link, metrics, settings, worker_id, self._suspension, self._prefixes
        )
        calls = settings.most_rows + settings.queue + OTHER_CALLS
        interceptors: list[Any] = [StatusInterceptor((SERVICE,))]
        if settings.tokens_file is not None:
            interceptors.append(TokenInterceptor(Tokens(settings.tokens_file), ["client"]))
        self.host = GrpcHost([SERVICE], interceptors, calls, with_reflection=settings.reflection)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(generation), self.host.server)
        tls_metrics = TlsMetrics(registry, "worker")
        certificate = ServerCertificate(settings.tls, tls_metrics) if settings.tls else None
        self.port = self.host.bind(settings.host, settings.port, certificate)
        self._endpoint = MetricsEndpoint(registry, settings.metrics_host, settings.metrics_port)
        self.metrics_port = self._endpoint.port

    @property
    def cache(self) -> ResidentCache:
        """Where rows live."""
        return self._engine.cache

    async def __aenter__(self) -> Self:
        self._engine.start()
        if self._link and self._uploader:
            await self._link.start()
            self._uploader.start()
        if self._prefixes:
            self._prefixes.start()
        await self.host.start()
        return self

    async def drain(self) -> None:
        """End all answers; what sessions have read and said so far is kept for their next turns."""
        await asyncio.to_thread(self._engine.stop, STOP_SECONDS)
        if self._suspension:
            await self._suspension.stop(STOP_SECONDS)

    async def __aexit__(self, *exception: object) -> None:
        await self.host.stop(0)
        await asyncio.to_thread(self._engine.stop, STOP_SECONDS)
        if self._link and self._uploader:
            if self._prefixes:
                await self._prefixes.stop(STOP_SECONDS)
            if self._suspension:
                await self._suspension.stop(STOP_SECONDS)
            await self._uploader.stop(STOP_SECONDS)
            await self._link.stop()
        self._endpoint.close()

    def _ended(self, task: Task, keep_evicted: bool) -> None:
        """Close a task's session behind its segments; called from the engine's thread."""
        if task.prefix:
            task.prefix.drop()
        if not (self._link and self._uploader and self._link.release(task.session_id)):
            return
        if task.turn and self._suspension:
            self._loop.call_soon_threadsafe(self._suspension.end, task)
        else:
            self._uploader.end(task.session_id, discard=not keep_evicted, quality=task.quality.message())


async def _serve(settings: WorkerSettings, loaded: LoadedModel) -> None:
    async with Worker(settings, loaded) as worker:
        listening = address(settings.host, worker.port)
        metrics = address(settings.metrics_host, worker.metrics_port)
        signals = StopSignals()
        # Whoever started us waits for this line.
        click.echo(f"worker ready on {listening}, metrics on {metrics}")
        await signals.run(worker.host, settings.grace, worker.drain)
