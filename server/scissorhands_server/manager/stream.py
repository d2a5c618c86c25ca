"""Reading a client's stream with a deadline for every message."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from scissorhands.errors import ScissorhandsError, UnavailableError

Message = TypeVar("Message")


class MessageStream(Generic[Message]):
    """The messages of a client stream, none of which may take too long.

    Args:
        messages: The stream.
        timeout: The most that the next message may take, in seconds.
    """

    def __init__(self, messages: AsyncIterator[Message], timeout: float) -> None:
        self._messages = messages
        self._timeout = timeout

    async def next(self) -> Message | None:
        """Return the next message, None at the end of the stream.

        Raises:
            UnavailableError: It did not come in time.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return await anext(self._messages, None)
        except TimeoutError as error:
            raise UnavailableError(f"the client sent nothing for {self._timeout:g} s") from error

    @asynccontextmanager
    async def heard_out(self) -> AsyncIterator[None]:
        """Let the client finish before the block's result or error ends the call; no longer than a message may take.

        A client that is still writing when its call ends is told INTERNAL by grpc, whatever the status was.
        """
        try:
            yield
        except ScissorhandsError:
            await self._read_past()
            raise
        await self._read_past()

    async def _read_past(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                async for _ in self._messages:
                    pass
