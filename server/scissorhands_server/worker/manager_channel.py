"""The worker's channel to its managers, opened anew when the files change that it shows and trusts."""

import asyncio
import logging

import grpc
from grpc_health.v1 import health_pb2_grpc

from scissorhands.credentials import Credentials
from scissorhands.errors import InvalidRequestError
from scissorhands.v1 import cache_manager_pb2_grpc
from scissorhands_server.row_messages import RowCalls
from scissorhands_server.worker.balancing import balanced_channel

LOGGER = logging.getLogger(__name__)

# How long a channel stays that was replaced: longer than the longest deadline of a call that it may still carry.
REPLACED_SECONDS = 300.0


class ManagerChannel:
    """A channel and what is called over it. Take the stubs anew for each call: they change with the channel.

    gRPC reads a client's certificate once a channel, so a changed one needs another channel.

    Args:
        address: ``host:port`` of the manager, or of several (:func:`balanced_channel`).
        credentials: How they are reached; None does without TLS.

    Raises:
        InvalidRequestError: A file of the credentials cannot be used.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._credentials = credentials or Credentials()
        self._version = self._credentials.version()
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._open()

    def renew(self) -> None:
        """Open the channel anew if a file has changed; calls in progress go on over the old one."""
        version = self._credentials.version()
        if version == self._version:
            return
        self._version = version
        old = self._channel
        try:
            self._open()
        except (InvalidRequestError, OSError) as error:
            LOGGER.warning("the connection to the cache manager stays as it was: manager_%s", error)
            return
        LOGGER.info("the certificates for the cache manager have changed")
        closing = asyncio.create_task(_close_later(old))
        self._replaced[closing] = old
        closing.add_done_callback(self._replaced.pop)

    async def close(self) -> None:
        """End all calls and close the channel."""
        replaced = dict(self._replaced)
        for task in replaced:
            task.cancel()
        await asyncio.gather(*replaced, return_exceptions=True)
        for channel in (*replaced.values(), self._channel):
            await channel.close(grace=None)

    def _open(self) -> None:
        self._channel = balanced_channel(self._address, self._credentials)
        self.stub = cache_manager_pb2_grpc.CacheManagerServiceStub(self._channel)
        self.rows = RowCalls(self._channel)
        self.health = health_pb2_grpc.HealthStub(self._channel)


async def _close_later(channel: grpc.aio.Channel) -> None:
    await asyncio.sleep(REPLACED_SECONDS)
    await channel.close(grace=None)
