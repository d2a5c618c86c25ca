"""How a client reaches a server: the channel's options and the deadlines, alike for the sync and the async form."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from scissorhands.credentials import Credentials
from scissorhands.errors import InvalidRequestError as RefusedFieldError
from scissorhands.token_channel import LOOPBACK
from scissorhands_client.errors import InvalidRequestError

DEFAULT_WORKER = "127.0.0.1:50051"
DEFAULT_MANAGER = "127.0.0.1:50052"

# How long a streamed answer may take, in seconds.
GENERATE_TIMEOUT = 600.0
# How long any other call may take, in seconds.
CALL_TIMEOUT = 10.0

# A server that was restarted is found again within two seconds; gRPC's own backoff grows to two minutes.
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Notice a server that is stopped or unplugged; ours answer such pings.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Status details travel in trailers; gRPC's default of 8 KiB leaves little room beside them.
    ("grpc.max_metadata_size", 16 * 2**10),
    # Whatever a server sends is one event or one page of sessions; a runaway message is refused.
    ("grpc.max_receive_message_length", 16 * 2**20),
)


# Workers are alike, and conversations go on at any of them: calls take turns over all addresses of a name, leaving out
# those that are gone. See https://grpc.io/docs/guides/custom-load-balancing/.
_IN_TURNS = ("grpc.lb_policy_name", "round_robin")


def opened(server: str, credentials: Credentials | None, chosen: Sequence[tuple[str, int | str]]) -> grpc.Channel:
    """Open a channel to a server.

    Args:
        server: Its address.
        credentials: How it is reached; None does without TLS.
        chosen: Options of the channel.

    Raises:
        InvalidRequestError: The address names no port, or a file of the credentials cannot be used.
    """
    with _local():
        return (credentials or Credentials()).channel(checked_address(server), chosen)


def aio_opened(
    server: str, credentials: Credentials | None, chosen: Sequence[tuple[str, int | str]]
) -> grpc.aio.Channel:
    """Open a channel for asyncio; as :func:`opened`."""
    with _local():
        return (credentials or Credentials()).aio_channel(checked_address(server), chosen)


def options(address: str) -> tuple[tuple[str, int | str], ...]:
    """Return the options of a channel to the server at ``address``."""
    # A proxy from the environment has no place between this machine and itself; gRPC would send even that through it.
    return (*_OPTIONS, ("grpc.enable_http_proxy", 0)) if LOOPBACK.fullmatch(address) else _OPTIONS


def worker_options(address: str) -> tuple[tuple[str, int | str], ...]:
    """Return the options of a channel to the workers at ``address``."""
    return (*options(address), _IN_TURNS)


def checked_address(address: str) -> str:
    """Return ``address`` if it names a port.

    Raises:
        InvalidRequestError: It does not; gRPC would silently take port 443.
    """
    if ":" not in address:
        raise InvalidRequestError.local("address", f"must be HOST:PORT, got {address!r}")
    return address


def checked_timeout(timeout: float) -> float:
    """Return ``timeout`` if it is a deadline.

    Raises:
        InvalidRequestError: It is not above 0; every call has a deadline.
    """
    if not 0 < timeout < float("inf"):
        raise InvalidRequestError.local("timeout", f"must be a finite number of seconds above 0, got {timeout}")
    return timeout


@contextmanager
def _local() -> Iterator[None]:
    try:
        yield
    except RefusedFieldError as error:
        raise InvalidRequestError.local(error.field, error.description) from error
