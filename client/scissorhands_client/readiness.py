"""What waiting for a server decides, alike for the sync and the async form."""

import time

import grpc
from grpc_health.v1 import health_pb2

from scissorhands_client.channel import checked_timeout
from scissorhands_client.errors import ClientError, DeadlineExceededError, ServerUnavailableError

# How long to wait between two questions, in seconds.
_POLL = 0.2


class Readiness:
    """Judges the answers of a server that may be starting or loading its model.

    Args:
        timeout: How long to wait for it, in seconds.

    Raises:
        InvalidRequestError: The timeout is no deadline.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = checked_timeout(timeout)
        self._deadline = time.monotonic() + timeout
        self._answer = "nothing"

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def pause(self) -> float:
        """Seconds to wait before asking again."""
        return min(_POLL, self.left)

    def serves(self, response: health_pb2.HealthCheckResponse) -> bool:
        """Return whether the server is ready, and remember its answer if not."""
        self._answer = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def failed(self, failure: ClientError) -> None:
        """Remember a failure that time may heal; raise any other.

        Raises:
            ClientError: What answers is not one of our servers.
        """
        if not isinstance(failure, ServerUnavailableError | DeadlineExceededError):
            raise failure
        self._answer = str(failure)

    def expired(self) -> DeadlineExceededError:
        """Return the error for a server that was not ready in time."""
        return DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"not ready after {self._timeout:g} s; its last answer: {self._answer}"
        )
