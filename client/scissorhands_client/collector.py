"""Putting a stream's events together."""

import grpc

from scissorhands_client.errors import ServerError
from scissorhands_client.types import Accepted, Delta, Event, Finish, Result


class Collector:
    """Puts a stream's events together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._accepted: Accepted | None = None
        self._finish: Finish | None = None

    def add(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Delta):
            self._text.append(event.text)
            self._token_ids.extend(event.token_ids)
        elif isinstance(event, Accepted):
            self._accepted = event
        elif isinstance(event, Finish):
            self._finish = event

    def result(self) -> Result:
        """Return the answer.

        Raises:
            ServerError: An event that every answer has is missing.
        """
        if self._accepted is None or self._finish is None:
            raise ServerError(grpc.StatusCode.INTERNAL, "the stream lacks its accepted or its finish event")
        return Result("".join(self._text), tuple(self._token_ids), self._accepted, self._finish)
