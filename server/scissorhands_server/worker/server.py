"""The worker process: settings become a model, a cache, an engine, a link and a gRPC server."""

import asyncio
import logging
import secrets
from functools import partial

import torch
from prometheus_client import CollectorRegistry

from scissorhands.cache import ResidentCache
from scissorhands.probe import probe
from scissorhands.v1 import generation_pb2, generation_pb2_grpc
from scissorhands.wire import model_shape
from scissorhands_server.hosting import GrpcHost, MetricsEndpoint, address, configure_logging, run_until_signal
from scissorhands_server.status import StatusInterceptor
from scissorhands_server.worker.engine import Engine
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.loading import LoadedModel, load
from scissorhands_server.worker.metrics import WorkerMetrics
from scissorhands_server.worker.offload import NoSink, Offloader
from scissorhands_server.worker.planner import RemotePlanner
from scissorhands_server.worker.service import GenerationHost
from scissorhands_server.worker.servicer import GenerationServicer
from scissorhands_server.worker.settings import WorkerSettings
from scissorhands_server.worker.task import Task
from scissorhands_server.worker.uploader import Uploader

LOGGER = logging.getLogger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
STOP_SECONDS = 5.0


def run(settings: WorkerSettings) -> None:
    """Load the model and serve it until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: A setting cannot be used, or there is no such model.
        UnsupportedModelError: The model would not be served rightly.
    """
    configure_logging(settings.log_level)
    torch.set_num_threads(settings.threads)
    loaded = load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        cache_folder=settings.cache_folder.expanduser(),
        name=settings.model_name,
        progress=lambda text: LOGGER.info("loading: %s", text),
    )
    LOGGER.info("loading: probing the attention of %s", loaded.info.architecture)
    probe(loaded.model)
    asyncio.run(_serve(settings, loaded))


async def _serve(settings: WorkerSettings, loaded: LoadedModel) -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, loaded.info.name, settings.rows, settings.queue)
    loop = asyncio.get_running_loop()
    link = ManagerLink(settings.manager, metrics, settings.manager_deadline) if settings.manager else None
    uploader = Uploader(link, loop, settings.staging_bytes) if link else None
    planner = RemotePlanner(link, loop) if link else None
    cache = ResidentCache(model_shape(loaded.info), loaded.model.dtype, loaded.model.device, planner)
    engine = Engine(
        loaded,
        cache,
        Offloader(loaded.info, uploader or NoSink(), metrics),
        metrics,
        rows=settings.rows,
        queue=settings.queue,
        plan_deadline=settings.plan_deadline,
        ended=partial(_ended, link, uploader),
    )
    worker_id = settings.worker_id or secrets.token_hex(6)
    generation = GenerationHost(loaded, engine, link, metrics, settings, worker_id)
    host = GrpcHost([SERVICE], interceptors=[StatusInterceptor((SERVICE,))])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(generation), host.server)
    port = host.bind(settings.host, settings.port)
    with MetricsEndpoint(registry, settings.metrics_host, settings.metrics_port) as endpoint:
        engine.start()
        try:
            if link and uploader:
                await link.start()
                uploader.start()
            await host.start()
            where = address(settings.host, port)
            print(f"worker ready on {where}, metrics on {address(settings.metrics_host, endpoint.port)}", flush=True)  # noqa: T201 - scripts wait for this line
            await run_until_signal(host, settings.grace)
        finally:
            await asyncio.to_thread(engine.stop, STOP_SECONDS)
            if link and uploader:
                await uploader.stop(STOP_SECONDS)
                await link.stop()


def _ended(link: ManagerLink | None, uploader: Uploader | None, task: Task, keep_evicted: bool) -> None:
    """Close a task's session behind its segments; called from the engine's thread."""
    if link and uploader and link.release(task.session_id):
        uploader.end(task.session_id, discard=not keep_evicted)
