"""The async client of a worker: the same as the sync one, over ``grpc.aio``."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scissorhands.credentials import Credentials
from scissorhands.v1 import generation_pb2, generation_pb2_grpc
from scissorhands_client import channel
from scissorhands_client.collector import Collector
from scissorhands_client.convert import generate_request, read_event, read_served_model
from scissorhands_client.errors import RequestCancelledError, ServerError, from_rpc_error
from scissorhands_client.readiness import Readiness
from scissorhands_client.records import ServedModel
from scissorhands_client.types import Event, Finish, GenerateOptions, Prompt, Result


class AsyncGenerateStream(AsyncIterator[Event]):
    """The events of one answer. Leaving its ``async with`` block, or :meth:`cancel`, frees the worker's row.

    Args:
        call: The running call; the stream owns it.
    """

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
    ) -> None:
        self._call = call
        self._finished = False
        self._cancelled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event.

        Raises:
            ClientError: The request was refused, failed, was cancelled or took too long.
        """
        while True:
            message = await self._read()
            if message is None:
                if not self._finished:
                    raise ServerError(grpc.StatusCode.INTERNAL, "the stream ended without a finish event")
                raise StopAsyncIteration
            event = read_event(message)
            if event is not None:
                self._finished = isinstance(event, Finish)
                return event

    def cancel(self) -> None:
        """Cancel the request; after its end this does nothing. Later reads raise ``RequestCancelledError``."""
        self._cancelled = self._call.cancel() or self._cancelled

    async def result(self) -> Result:
        """Read the stream to its end and collect the answer.

        Raises:
            ClientError: The request was refused, failed, was cancelled or took too long.
        """
        collector = Collector()
        async with self:
            async for event in self:
                collector.add(event)
        return collector.result()

    async def _read(self) -> generation_pb2.GenerateResponse | None:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # grpc raises this for a call that cancel() ended, too; only then is it ours to translate.
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise RequestCancelledError(grpc.StatusCode.CANCELLED, "the request was cancelled") from None
        return message if isinstance(message, generation_pb2.GenerateResponse) else None


class AsyncClient:
    """A connection to one worker, for one event loop. Close it, or use it as an async context manager.

    Args:
        server: Address of the worker, as ``host:port``; or of several, over which calls take turns: a host with
            several addresses, or ``ipv4:10.0.0.1:50051,10.0.0.2:50051``.
        timeout: How long an answer may take unless its call says otherwise, in seconds.
        call_timeout: How long any other call may take, in seconds.
        credentials: How the server is reached if it uses TLS; their files are read once.

    Raises:
        InvalidRequestError: An argument is out of range.
    """

    def __init__(
        self,
        server: str = channel.DEFAULT_WORKER,
        *,
        timeout: float = channel.GENERATE_TIMEOUT,
        call_timeout: float = channel.CALL_TIMEOUT,
        credentials: Credentials | None = None,
    ) -> None:
        self._timeout = channel.checked_timeout(timeout)
        self._call_timeout = channel.checked_timeout(call_timeout)
        self._channel = channel.aio_opened(server, credentials, channel.worker_options(server))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close(grace=None)

    def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, *, timeout: float | None = None
    ) -> AsyncGenerateStream:
        """Ask for an answer and return its events as they come.

        Args:
            prompt: Text, chat messages or token ids.
            options: What else decides the answer.
            timeout: How long the whole answer may take, in seconds; None takes the client's.

        Raises:
            InvalidRequestError: A value does not fit the protocol. Everything else is raised by the stream.
        """
        request = generate_request(prompt, options or GenerateOptions())
        deadline = self._timeout if timeout is None else channel.checked_timeout(timeout)
        return AsyncGenerateStream(self._stub.Generate(request, timeout=deadline))

    async def get_model(self) -> ServedModel:
        """Return what the worker serves.

        Raises:
            ClientError: The call failed.
        """
        try:
            response = await self._stub.GetModel(generation_pb2.GetModelRequest(), timeout=self._call_timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return read_served_model(response)

    async def wait_ready(self, timeout: float) -> None:  # noqa: ASYNC109 - its error says what the server answered last.
        """Wait until the worker serves; it may be starting or loading its model.

        Args:
            timeout: How long to wait, in seconds.

        Raises:
            DeadlineExceededError: It does not serve in time; the message says what it answered last.
            ClientError: What answers is no worker.
        """
        readiness = Readiness(timeout)
        while readiness.left > 0:
            try:
                response = await self._health.Check(
                    health_pb2.HealthCheckRequest(), timeout=min(readiness.left, self._call_timeout)
                )
            except grpc.RpcError as error:
                readiness.failed(from_rpc_error(error))
            else:
                if readiness.serves(response):
                    return
            await asyncio.sleep(readiness.pause)
        raise readiness.expired()
