"""The subcommand ``scissorhands manager``."""

import asyncio
from pathlib import Path
from typing import Any

import click

from scissorhands.errors import ConfigurationError
from scissorhands_server.manager.server import serve
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import load_settings, settings_options


@click.command()
@settings_options(ManagerSettings)
def manager(config: Path | None, **options: Any) -> None:
    """Run a cache manager: it grants budgets, plans evictions and stores what was evicted."""
    try:
        asyncio.run(serve(load_settings(ManagerSettings, options, config), click.echo))
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
