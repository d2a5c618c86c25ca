"""A channel that says with every call who makes it: a bearer token (RFC 6750) in its metadata.

Not gRPC's call credentials, which take a thread a call, and no plain connection, not even to this machine itself.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scissorhands.errors import InvalidRequestError
from scissorhands.file_version import Reread

_HOST = r"(localhost|127(\.\d{1,3}){3}|\[::1\]):\d+"
# Addresses of this machine itself.
LOOPBACK = re.compile(rf"(ipv[46]:)?{_HOST}(,{_HOST})*", re.ASCII)

# What RFC 6750 allows, and of a length that nobody guesses.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]{20,512}=*", re.ASCII)


def read_token(path: Path) -> str:
    """Read a token from a file that holds nothing else.

    Raises:
        InvalidRequestError: The file cannot be read, or holds no token. The message does not quote it.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII"
        raise InvalidRequestError("token_file", f"{path} cannot be used: {reason}") from error
    if not _TOKEN.fullmatch(token):
        raise InvalidRequestError(
            "token_file",
            f"{path} must hold one token of 20 to 512 letters, digits and -._~+/, such as openssl rand -hex 32 makes",
        )
    return token


class Token:
    """A token in a file, read again when that changes.

    Args:
        path: The file.

    Raises:
        InvalidRequestError: It cannot be used.
    """

    def __init__(self, path: Path) -> None:
        # If it is not good any more, the server says so.
        self._token = Reread(lambda: read_token(path), path)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a call says of who makes it; of a file that is of no use now, what it held before."""
        return (("authorization", f"Bearer {self._token.value()}"),)


class TokenChannel:
    """A channel, sync or async, whose calls carry a token; stubs take it as they take any.

    Args:
        channel: The channel; it is closed with this one.
        token: What its calls carry.
    """

    def __init__(self, channel: Any, token: Token) -> None:
        self._channel = channel
        self._token = token
        self.close = channel.close

    def unary_unary(self, *described: Any, **options: Any) -> Callable[..., Any]:
        """Return a call of one request and one response."""
        return self._carrying(self._channel.unary_unary(*described, **options))

    def unary_stream(self, *described: Any, **options: Any) -> Callable[..., Any]:
        """Return a call of one request and many responses."""
        return self._carrying(self._channel.unary_stream(*described, **options))

    def stream_unary(self, *described: Any, **options: Any) -> Callable[..., Any]:
        """Return a call of many requests and one response."""
        return self._carrying(self._channel.stream_unary(*described, **options))

    def stream_stream(self, *described: Any, **options: Any) -> Callable[..., Any]:
        """Return a call of many requests and many responses."""
        return self._carrying(self._channel.stream_stream(*described, **options))

    def _carrying(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def carried(*arguments: Any, **named: Any) -> Any:
            return call(*arguments, metadata=self._token.metadata(), **named)

        return carried
