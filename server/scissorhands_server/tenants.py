"""Who may call: tokens, the tenants that they stand for, and what their roles allow."""

import hashlib
import logging
import re
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
from grpc_health.v1 import health
from grpc_status import rpc_status

from scissorhands.errors import (
    ConfigurationError,
    ForbiddenError,
    NotFoundError,
    ScissorhandsError,
    UnauthenticatedError,
)
from scissorhands.file_version import Reread
from scissorhands.tenant import DEFAULT_TENANT, TENANT, qualified, split
from scissorhands_server.status import status_message

LOGGER = logging.getLogger(__name__)

Role = Literal["client", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Caller:
    """Who a token stands for.

    Args:
        tenant: Name of its tenant.
        role: What it may do: generate (client), call a manager for its requests (worker), or everything (operator).
    """

    tenant: str
    role: Role


# Who makes the call that the running task serves; None where there are no tokens.
_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller() -> Caller | None:
    """Return who makes the call that is being served; None where there are no tokens."""
    return _CALLER.get()


def caller_tenant() -> str:
    """Return whose the call is that is being served."""
    known = caller()
    return known.tenant if known else DEFAULT_TENANT


def scope() -> str | None:
    """Return the one tenant that the call that is being served may see; None if it may see all."""
    known = caller()
    return known.tenant if known and known.role == "client" else None


def own_name(name: str) -> str:
    """Return the qualified name of what a caller names; who may see all tenants names it so.

    Raises:
        NotFoundError: A client names another tenant.
    """
    tenant = scope()
    if tenant is None:
        return name
    if "/" in name:
        raise NotFoundError("session_id", f"no session {name!r}; it was never opened or is forgotten")
    return qualified(tenant, name)


def seen_name(name: str) -> str:
    """Return what a caller calls something of which the qualified name is given."""
    return name if scope() is None else split(name)[1]


class Tokens:
    """A file of tokens, read again when it changes.

    It holds SHA-256 digests, so that reading it gives nobody a token; tokens are long and random, so a digest needs no
    salt. A token is looked up by its digest, which a caller cannot steer, so the time that it takes tells nothing.

    Args:
        path: The file, in TOML: tables ``[[token]]`` with ``sha256``, ``tenant`` and ``role``.

    Raises:
        ConfigurationError: It cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._callers = Reread(
            lambda: _read(path),
            path,
            refused=lambda error: LOGGER.warning("tokens stay as they were: %s", error),
            changed=lambda callers: LOGGER.info("tokens have changed: %d are known", len(callers)),
        )

    def caller(self, token: str) -> Caller | None:
        """Return who a token stands for; None if it is not known."""
        return self._callers.value().get(hashlib.sha256(token.encode()).hexdigest())


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # Generic in its stubs only.
    """Lets a call through if its token allows it; health may be asked by everybody.

    Args:
        tokens: The tokens.
        roles: Roles that may call this server; operators always may.
        methods: The same for single methods, by their names.
    """

    def __init__(
        self, tokens: Tokens, roles: Collection[Role], methods: Mapping[str, Collection[Role]] | None = None
    ) -> None:
        self._tokens = tokens
        self._roles = roles
        self._methods = methods or {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Refuse a call, or hand it on."""
        method = str(handler_call_details.method)
        if not method.startswith(f"/{health.SERVICE_NAME}/"):
            try:
                # Its handler runs in this task, and finds it there.
                _CALLER.set(self._check(method, handler_call_details.invocation_metadata))
            except ScissorhandsError as error:
                return _refusing(error)
        return await continuation(handler_call_details)

    def _check(self, method: str, metadata: Any) -> Caller:
        given = next((value for key, value in metadata or () if key == "authorization"), "")
        scheme, _, token = str(given).partition(" ")
        if not given:
            raise UnauthenticatedError("this server asks for a token: give token_file (--token-file)")
        known = self._tokens.caller(token.strip()) if scheme.lower() == "bearer" else None
        if known is None:
            raise UnauthenticatedError("the token is not known: give one whose digest the server's tokens_file has")
        name = method.rpartition("/")[2]
        allowed = ["operator", *self._methods.get(name, self._roles)]
        if known.role not in allowed:
            raise ForbiddenError(f"{name} needs a token of the role {' or '.join(allowed)}, not {known.role}")
        return known


def _refusing(error: ScissorhandsError) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
        del requests
        status = rpc_status.to_status(status_message(error))
        await context.abort(status.code, status.details, status.trailing_metadata)
        yield b""  # Never reached; it makes this a stream, which waits for no request of whatever kind the call is.

    return grpc.stream_stream_rpc_method_handler(refuse)


def _read(path: Path) -> dict[str, Caller]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigurationError(f"tokens_file: {path} has more than {_MOST_BYTES} bytes")
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"tokens_file: {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # What is wrong with it might be quoted, and somebody may have put a token there.
        raise ConfigurationError(f"tokens_file: {path} is no TOML") from error
    tables = found.pop("token", [])
    if found or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"tokens_file: {path} must hold tables [[token]] and nothing else")
    callers: dict[str, Caller] = {}
    for number, table in enumerate(tables, 1):
        digest, caller = _entry(table, f"tokens_file: {path}: token {number}")
        if digest in callers:
            raise ConfigurationError(f"tokens_file: {path}: token {number} is there twice")
        callers[digest] = caller
    return callers


def _entry(table: dict[str, Any], where: str) -> tuple[str, Caller]:
    digest, tenant, role = (str(table.pop(name, "")) for name in ("sha256", "tenant", "role"))
    if table:
        raise ConfigurationError(f"{where} has unknown keys; allowed: sha256, tenant, role")
    if not _DIGEST.fullmatch(digest):
        raise ConfigurationError(f"{where}: sha256 must be 64 lower-case hex digits, the SHA-256 of the token")
    if not TENANT.fullmatch(tenant):
        raise ConfigurationError(f"{where}: tenant must be 1 to 63 lower-case letters, digits and -")
    if role not in ROLES:
        raise ConfigurationError(f"{where}: role must be one of {', '.join(ROLES)}")
    return digest, Caller(tenant, role)
