"""How whoever calls a server of ours protects the connection and shows who it is; alike for clients and the worker."""

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from scissorhands.errors import InvalidRequestError
from scissorhands.file_version import FilesVersion, files_version
from scissorhands.token_channel import LOOPBACK, Token, TokenChannel, read_token

# What gRPC says of a connection that did not come about, and what to do. Nothing of it is said in the middle of a call.
_NOT_CONNECTED = ("failed to connect", "connections to all backends failing")
_HINTS = (
    (
        "Socket closed",
        "if the server uses TLS, give {ca_file}; if it asks for a certificate, give a {certificate} that it trusts",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "{ca_file} names no authority of the server's certificate, or that is out of date"),
    ("is not in peer certificate", "name the server as its certificate does, or give {server_name}"),
    ("WRONG_VERSION_NUMBER", "the server does not use TLS: leave {ca_file} out"),
)


@dataclass(frozen=True)
class Credentials:
    """What a caller needs to reach a server. Without a CA file, nothing is encrypted.

    Args:
        ca_file: Certificates of the authorities that vouch for the server, in PEM; None does without TLS.
        certificate: Certificate to show to a server that asks for one, in PEM; None shows none.
        key: Its key, in PEM; None if the certificate's file has it.
        server_name: Name that the server's certificate must have; empty takes the host of the address.
        token_file: File with the token that says who calls; None sends none. It is read anew when it changes, and sent
            only with TLS or to this machine itself.
    """

    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token_file: Path | None = None

    def check(self) -> None:
        """Make sure that all of it can be used.

        Raises:
            InvalidRequestError: A file cannot be read or holds something else, or something is missing beside it. Its
                field is that of this class.
        """
        if self.ca_file is None:
            for name in ("certificate", "key", "server_name"):
                if getattr(self, name):
                    raise InvalidRequestError(name, "needs ca_file, without which nothing is encrypted")
        check_certificates(self.ca_file, self.certificate, self.key)
        if self.token_file is not None:
            read_token(self.token_file)

    def version(self) -> FilesVersion:
        """Return what changes when one of the files does."""
        return files_version(self.ca_file, self.certificate, self.key)

    def channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Open a channel, with the files as they are now.

        Args:
            target: Address of the server.
            options: Options of the channel.

        Raises:
            InvalidRequestError: A file cannot be used.
        """
        opened: grpc.Channel = self._open(grpc.insecure_channel, grpc.secure_channel, target, options)
        return opened

    def aio_channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """Open a channel for asyncio; as :meth:`channel`."""
        opened: grpc.aio.Channel = self._open(grpc.aio.insecure_channel, grpc.aio.secure_channel, target, options)
        return opened

    def _open(
        self, plain: Callable[..., Any], secure: Callable[..., Any], target: str, options: Sequence[tuple[str, Any]]
    ) -> Any:
        self.check()
        if self.token_file is None:
            return self._protected(plain, secure, target, options)
        if self.ca_file is None and not LOOPBACK.fullmatch(target):
            raise InvalidRequestError("token_file", f"needs ca_file: a token is not sent to {target} without TLS")
        return TokenChannel(self._protected(plain, secure, target, options), Token(self.token_file))

    def _protected(
        self, plain: Callable[..., Any], secure: Callable[..., Any], target: str, options: Sequence[tuple[str, Any]]
    ) -> Any:
        if self.ca_file is None:
            return plain(target, options=options)
        key = self.key or self.certificate
        credentials = grpc.ssl_channel_credentials(
            self.ca_file.read_bytes(),
            key.read_bytes() if key else None,
            self.certificate.read_bytes() if self.certificate else None,
        )
        named = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        return secure(target, credentials, options=(*options, *named))


def check_certificates(ca_file: Path | None, certificate: Path | None, key: Path | None) -> None:
    """Make sure that certificates and their key can be used.

    Args:
        ca_file: Certificates of authorities, in PEM.
        certificate: Certificate with those between it and its authority, in PEM.
        key: Its key, in PEM; None if the certificate's file has it.

    Raises:
        InvalidRequestError: A file cannot be used; its field is the argument's name.
    """
    if key is not None and certificate is None:
        raise InvalidRequestError("key", "needs certificate")
    if ca_file is not None:
        with _named("ca_file", ca_file):
            ssl.create_default_context(cafile=ca_file)
    if certificate is not None:
        with _named("certificate", certificate if key is None else f"{certificate} with {key}"):
            # A key with a password would be asked for at the terminal.
            ssl.create_default_context().load_cert_chain(certificate, key, password="")


def connection_hint(details: str, option: str = "") -> str:
    """Return what to do about a connection that did not come about; empty if nothing is known.

    Args:
        details: What gRPC says of it.
        option: What an option's name begins with where these are options, such as ``--``; empty names the fields.
    """
    if not details.startswith(_NOT_CONNECTED):
        return ""
    names = {
        each.name: f"{option}{each.name.replace('_', '-')}" if option else each.name for each in fields(Credentials)
    }
    return next((hint.format_map(names) for sign, hint in _HINTS if sign in details), "")


@contextmanager
def _named(name: str, path: object) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(name, f"{path} cannot be used: {reason}") from error
