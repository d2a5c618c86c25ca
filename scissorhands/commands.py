"""What the commands that run a model here have in common."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from scissorhands.errors import InvalidRequestError, ScissorhandsError


@contextmanager
def click_errors() -> Iterator[None]:
    """Turn our errors into click's, which name the option and set the exit code."""
    try:
        yield
    except InvalidRequestError as error:
        # The first part of a field is the option's name, such as of policy.preset.
        option = error.field.partition(".")[0]
        raise click.BadParameter(error.description, param_hint=f"--{option}") from error
    except ScissorhandsError as error:
        raise click.ClickException(str(error)) from error


def writable(path: Path | None, option: str) -> Path | None:
    """Return the path if it can be written; measuring takes minutes, so this is found out before.

    Raises:
        InvalidRequestError: There is no such folder.
    """
    if path and not path.absolute().parent.is_dir():
        raise InvalidRequestError(option, f"there is no folder {path.absolute().parent}")
    return path


def work(module: str, command: str, extra: str) -> Any:
    """Return the module that does a command's work, imported only now: torch takes seconds, help must not.

    Args:
        module: Its name within ``scissorhands``.
        command: The command's name.
        extra: What to install if something that it needs is missing.

    Raises:
        ClickException: It is.
    """
    try:
        return importlib.import_module(f"scissorhands.{module}")
    except ModuleNotFoundError as error:
        message = f"{command} needs the module {error.name}: pip install 'scissorhands[{extra}]'"
        raise click.ClickException(message) from error
