"""The sync client of a worker."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scissorhands.credentials import Credentials
from scissorhands.v1 import generation_pb2, generation_pb2_grpc
from scissorhands_client import channel
from scissorhands_client.collector import Collector
from scissorhands_client.convert import generate_request, read_event, read_served_model
from scissorhands_client.errors import (
    ServerError,
    from_rpc_error,
)
from scissorhands_client.readiness import Readiness
from scissorhands_client.records import ServedModel
from scissorhands_client.types import Event, Finish, GenerateOptions, Prompt, Result


class RunningCall(Protocol):
    """What a stream needs of grpcio's call."""

    def __iter__(self) -> Iterator[generation_pb2.GenerateResponse]:
        """Return the responses."""
        ...

    def cancel(self) -> object:
        """Cancel the call."""
        ...


class GenerateStream(Iterator[Event]):
    """The events of one answer. Leaving its ``with`` block, or :meth:`cancel`, frees the worker's row.

    Args:
        call: The running call; the stream owns it.
    """

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._responses = iter(call)
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """Wait for the next event.

        Raises:
            ClientError: The request was refused, failed, was cancelled or took too long.
        """
        while True:
            try:
                message = next(self._responses)
            except StopIteration:
                if not self._finished:
                    raise ServerError(grpc.StatusCode.INTERNAL, "the stream ended without a finish event") from None
                raise
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            event = read_event(message)
            if event is not None:
                self._finished = isinstance(event, Finish)
                return event

    def cancel(self) -> None:
        """Cancel the request; after its end this does nothing. Later reads raise ``RequestCancelledError``."""
        self._call.cancel()

    def result(self) -> Result:
        """Read the stream to its end and collect the answer.

        Raises:
            ClientError: The request was refused, failed, was cancelled or took too long.
        """
        collector = Collector()
        with self:
            for event in self:
                collector.add(event)
        return collector.result()


class Client:
    """A connection to one worker; safe to share between threads. Close it, or use it as a context manager.

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
        self._channel = channel.opened(server, credentials, channel.worker_options(server))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, *, timeout: float | None = None
    ) -> GenerateStream:
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
        return GenerateStream(self._stub.Generate(request, timeout=deadline))

    def get_model(self) -> ServedModel:
        """Return what the worker serves.

        Raises:
            ClientError: The call failed.
        """
        try:
            response = self._stub.GetModel(generation_pb2.GetModelRequest(), timeout=self._call_timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return read_served_model(response)

    def wait_ready(self, timeout: float) -> None:
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
                response = self._health.Check(
                    health_pb2.HealthCheckRequest(), timeout=min(readiness.left, self._call_timeout)
                )
            except grpc.RpcError as error:
                readiness.failed(from_rpc_error(error))
            else:
                if readiness.serves(response):
                    return
            time.sleep(readiness.pause)
        raise readiness.expired()
