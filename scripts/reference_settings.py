"""The reference of what can be set, from the servers' typed settings and the commands' own options."""

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from reference_markdown import code, page, table, text
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import ServerSettings, variable
from scissorhands_server.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
GROUP = "scissorhands.commands"
# Their options are their settings, which have pages of their own.
_SERVERS: dict[str, type[ServerSettings]] = {"manager": ManagerSettings, "worker": WorkerSettings}

_INTRODUCTION = """\
Each setting of a server is an option of its command, an environment variable, and a key of the TOML file that
`--config` names, spelled as the option with underscores. The command line wins over the environment, and that over the
file. A variable or a key that does not exist is refused at start-up, and so is a value out of bounds.

`scissorhands up` takes the worker's options too, but for those that it decides itself, and hands the environment to
both. [commands.md](commands.md) has the options of the other commands. [deployment.md](deployment.md) tells which
settings matter first."""

_COMMANDS = """\
What `--help` of each command prints. The settings of `scissorhands manager` and `scissorhands worker` are in
[configuration.md](configuration.md)."""


def settings_page() -> str:
    """Return the page of both servers' settings."""
    parts = [part for name, kind in _SERVERS.items() for part in (f"## scissorhands {name}", _settings_table(kind))]
    return page("Configuration", _INTRODUCTION, *parts)


def commands_page() -> str:
    """Return the page of every other command's arguments and options."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    commands = declared["project"]["entry-points"][GROUP]
    parts: list[str] = []
    for name in sorted(set(commands) - set(_SERVERS)):
        # Not the installed entry points: those may be older than the file.
        command: click.Command = EntryPoint(name, commands[name], GROUP).load()
        parts += _told(command, click.Context(command, info_name=f"scissorhands {name}"))
    return page("Commands", _COMMANDS, *parts)


def _settings_table(kind: type[ServerSettings]) -> str:
    heads = ["Option", "Variable", "Type", "Default", "Bounds", "Meaning"]
    return table(heads, (_setting(kind, name, field) for name, field in kind.model_fields.items()))


def _setting(kind: type[ServerSettings], name: str, field: FieldInfo) -> list[str]:
    dashed = name.replace("_", "-")
    option = f"--{dashed} / --no-{dashed}" if field.annotation is bool else f"--{dashed}"
    default = "required" if field.is_required() else code(_default(field.default)) or "none"
    bounds = " and ".join(_bounds(field))
    return [
        code(option),
        code(variable(kind, name)),
        _type(field.annotation),
        default,
        bounds,
        text(str(field.description)),
    ]


def _default(value: Any) -> str:
    if value is None or isinstance(value, SecretStr):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: Any) -> str:
    """Return what a value is, in a user's words."""
    if get_origin(annotation) is Literal:
        return ", ".join(code(str(choice)) if choice else "empty" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(each) for each in get_args(annotation) if each is not type(None))
    named = {bool: "yes or no", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "text, secret"}
    return named[annotation]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        match bound:
            case annotated_types.Gt(gt=least):
                yield f"above {least:,}"
            case annotated_types.Ge(ge=least):
                yield f"at least {least:,}"
            case annotated_types.Le(le=most):
                yield f"at most {most:,}"
            case annotated_types.MinLen(min_length=least):
                yield f"at least {least} characters" if least > 1 else "not empty"
            case annotated_types.MaxLen(max_length=most):
                yield f"at most {most} characters"
            case _:
                raise TypeError(f"no words for the bound {bound!r}")


def _told(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the parts that tell of a command, and of those below it."""
    yield f"## {context.command_path}"
    yield "\n\n".join(text(paragraph) for paragraph in (command.help or "").split("\n\n"))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _told(below, click.Context(below, info_name=name, parent=context))
        return
    yield "    " + " ".join([context.command_path, *command.collect_usage_pieces(context)])
    records = [_record(each, context) for each in _own_parameters(command)]
    yield table(["Option", "Meaning"], [[code(option), text(meaning)] for option, meaning in records if option])


def _own_parameters(command: click.Command) -> list[click.Parameter]:
    """Return its parameters without those that it passes on to a server, which are that server's settings."""
    passed_on = {f"--{name.replace('_', '-')}" for name in WorkerSettings.model_fields}
    return [
        each
        for each in command.params
        if not (passed_on.intersection(each.opts) and "env: SCISSORHANDS_" in str(getattr(each, "help", "")))
    ]


def _record(parameter: click.Parameter, context: click.Context) -> tuple[str, str]:
    return parameter.get_help_record(context) or ("", "")
