"""The gRPC servicer of a worker: decodes, calls, encodes; no logic lives here."""

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from scissorhands import __version__
from scissorhands.policies import policy_names
from scissorhands.v1 import generation_pb2, generation_pb2_grpc
from scissorhands_server.worker.service import GenerationHost

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves ``GenerationService``.

    Args:
        host: What runs the requests.
    """

    def __init__(self, host: GenerationHost) -> None:
        self._host = host

    async def Generate(  # noqa: N802 - the protocol's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Answer one prompt."""
        del context
        responses = self._host.stream(request)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()

    async def GetModel(  # noqa: N802 - the protocol's name
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        """Describe the model and the worker."""
        del request, context
        loaded, settings = self._host.loaded, self._host.settings
        return generation_pb2.GetModelResponse(
            model=loaded.info,
            max_rows=settings.most_rows,
            max_queued=settings.queue,
            default_max_new_tokens=settings.default_max_new_tokens,
            policies=policy_names(),
            chat=bool(loaded.tokenizer.chat_template),
            version=__version__,
            manager_connected=self._host.link is not None and self._host.link.up,
            cache_bytes=settings.cache_bytes,
            more_rows=self._host.more_rows,
        )
