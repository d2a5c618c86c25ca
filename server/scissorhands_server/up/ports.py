"""Ports: taken ones are refused before anything starts, and 0 becomes a free one that is kept over restarts."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack

from scissorhands.errors import ConfigurationError
from scissorhands_server.hosting import address

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}  # noqa: S104 - Told apart, not listened on.


def reachable(host: str) -> str:
    """Return where a server that listens on ``host`` is reached from this machine."""
    return _ANY.get(host, host)


def choose_ports(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return a port for every option: the wanted one if it is free, for 0 any free one.

    Args:
        host: Address that will be listened on.
        wanted: Ports by the option that sets them.

    Raises:
        ConfigurationError: A port is taken or wanted twice, or the host is not ours.
    """
    by_port: dict[int, str] = {}
    for option, port in wanted.items():
        if port and port in by_port:
            raise ConfigurationError(f"{option} and {by_port[port]} are both {port}; 0 picks a free one")
        by_port[port] = option
    chosen = {}
    # All are held until the last one is chosen, so that none is chosen twice. The fixed ones come first.
    with ExitStack() as held:
        for option, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            listening = held.enter_context(_listen(host, port, option))
            chosen[option] = int(listening.getsockname()[1])
    return chosen


def _listen(host: str, port: int, option: str) -> socket.socket:
    plain = host.strip("[]")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    try:
        return socket.create_server((plain, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"{option}: cannot listen on {address(host, port)}: {error.strerror or error}; "
            "stop what listens there, or choose another port (0 picks a free one)"
        ) from error
