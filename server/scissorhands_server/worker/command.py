"""The command ``scissorhands worker``."""

import importlib
from pathlib import Path
from typing import Any

import click

from scissorhands.errors import ScissorhandsError
from scissorhands_server.settings import load_settings, settings_options
from scissorhands_server.worker.settings import WorkerSettings


@click.command()
@settings_options(WorkerSettings)
def worker(config: Path | None, **options: Any) -> None:
    """Serve a model: decode under a hard cache budget and stream answers over gRPC."""
    # Torch takes seconds to import; looking at the help must not.
    server = importlib.import_module("scissorhands_server.worker.server")
    try:
        server.run(load_settings(WorkerSettings, options, config))
    except ScissorhandsError as error:
        raise click.ClickException(str(error)) from error
