"""The options of commands that call a server: how the connection is protected, and who calls."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from scissorhands.credentials import Credentials

Command = TypeVar("Command", bound=Callable[..., Any])


def credentials_options(command: Command) -> Command:
    """Add the options to a command; its keyword argument ``credentials`` gets what they say."""

    @wraps(command)
    def collected(*, token_file: Path | None, server_name: str, **others: Any) -> Any:
        files = {name: others.pop(name) for name in ("ca_file", "certificate", "key")}
        return command(credentials=Credentials(**files, server_name=server_name, token_file=token_file), **others)

    decorated: Any = collected
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    found: Command = decorated
    return found


def _option(name: str, help_text: str, kind: Any = None, default: Any = None) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}",
        type=kind or click.Path(path_type=Path),
        default=default,
        envvar=f"SCISSORHANDS_CLIENT_{name.replace('-', '_').upper()}",
        show_envvar=True,
        help=help_text,
    )


_OPTIONS = (
    _option("ca-file", "Certificates of the authorities that vouch for the server, in PEM; without it, no TLS."),
    _option("certificate", "Certificate to show to the server, in PEM, if it asks for one."),
    _option("key", "Its key, in PEM, if the certificate's file has it not."),
    _option("token-file", "File with the token that says who calls; sent only with TLS, or to this machine itself."),
    _option("server-name", "Name that the server's certificate must have, if not the host of its address.", str, ""),
)
