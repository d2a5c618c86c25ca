"""How both servers read settings: command line over environment over an optional TOML file, unknown keys refused."""

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from scissorhands.errors import ConfigurationError

Loaded = TypeVar("Loaded", bound="ServerSettings")
Command = TypeVar("Command", bound=Callable[..., Any])

_CLICK_TYPES: "dict[type, click.ParamType[Any]]" = {int: click.INT, float: click.FLOAT, str: click.STRING}


class ServerSettings(BaseSettings):
    """Base of a server's settings. A subclass gives ``env_prefix`` in its ``model_config`` and described fields."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_ignore_empty=False)

    # What the TOML file held, for the source below. Set only on the class that :func:`load_settings` makes.
    file_values: ClassVar[dict[str, Any]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return our sources, the strongest first; no dotenv and no secrets folder, which would be read unasked."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, _FileSource(settings_cls, cls.file_values)


class _FileSource(PydanticBaseSettingsSource):
    """The values of a TOML file that has been read already."""

    def __init__(self, settings_cls: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        del field
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self._values)


def load_settings(
    kind: type[Loaded], command_line: Mapping[str, Any] | None = None, config: Path | None = None
) -> Loaded:
    """Read settings once, from all their sources.

    Args:
        kind: The settings to read.
        command_line: Options by field name; None means not given.
        config: TOML file, or None.

    Raises:
        ConfigurationError: A key or variable is unknown, a value is malformed, or the file cannot be read.
    """
    _refuse_unknown_variables(kind)
    values = {} if config is None else _read_file(kind, config)
    reading: type[Loaded] = type(kind.__name__, (kind,), {"file_values": values, "__module__": kind.__module__})
    given = {name: value for name, value in (command_line or {}).items() if value is not None}
    try:
        return reading(**given)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_told(kind, detail) for detail in error.errors())) from error


def settings_options(kind: type[ServerSettings]) -> Callable[[Command], Command]:
    """Return a decorator that gives a click command one option a field, and ``--config``.

    The options' defaults are None, which means that the other sources decide.
    """

    def decorate(command: Command) -> Command:
        for name, field in reversed(kind.model_fields.items()):
            command = _option(kind, name, field)(command)
        config = click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="TOML file with any of these settings, spelled with underscores.",
        )
        return config(command)

    return decorate


def variable(kind: type[ServerSettings], name: str) -> str:
    """Return the environment variable of a field."""
    return f"{kind.model_config['env_prefix']}{name}".upper()


def _option(kind: type[ServerSettings], name: str, field: FieldInfo) -> Callable[[Command], Command]:
    dashed = name.replace("_", "-")
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "none" if default is None else str(default) or "none"
    described = f"{field.description}  [env: {variable(kind, name)}; default: {shown}]"
    if field.annotation is bool:
        return click.option(f"--{dashed}/--no-{dashed}", name, default=None, help=described)
    # Anything but a plain number or text is read by pydantic from its text.
    plain = _CLICK_TYPES.get(field.annotation, click.STRING) if isinstance(field.annotation, type) else click.STRING
    return click.option(f"--{dashed}", name, type=plain, default=None, help=described)


def _refuse_unknown_variables(kind: type[ServerSettings]) -> None:
    prefix = str(kind.model_config["env_prefix"]).upper()
    known = {variable(kind, name) for name in kind.model_fields}
    unknown = sorted(name for name in os.environ if name.upper().startswith(prefix) and name.upper() not in known)
    if unknown:
        raise ConfigurationError(
            f"unknown environment variable {', '.join(unknown)}; allowed: {', '.join(sorted(known))}"
        )


def _read_file(kind: type[ServerSettings], path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    # Beside its own error, the parser raises ValueError for endless numbers, RecursionError for endless brackets.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    unknown = sorted(set(values) - set(kind.model_fields))
    if unknown:
        raise ConfigurationError(
            f"{path}: unknown key {', '.join(unknown)}; allowed: {', '.join(sorted(kind.model_fields))}"
        )
    return values


def _told(kind: type[ServerSettings], detail: ErrorDetails) -> str:
    if not detail["loc"]:
        return detail["msg"]
    name = str(detail["loc"][0])
    given = f", got {detail['input']!r}" if detail["type"] != "missing" else ""
    return f"{name} (--{name.replace('_', '-')} or {variable(kind, name)}): {detail['msg']}{given}"
