"""``scissorhands budgets``: what the KV heads of a model need, as the manager has measured it."""

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from scissorhands.credentials import Credentials
from scissorhands.profile import Profile
from scissorhands_client.commands.failures import reported
from scissorhands_client.commands.options import manager_options
from scissorhands_client.manager import ManagerClient
from scissorhands_client.records import MeasuredProfile

# Heads that are listed.
_SHOWN = 10


@click.command()
@click.option("--model", default="", help="Name or fingerprint of the model; without it, the one measured last.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a profile, for --profile of 'scissorhands eval' and of workers.",
)
@manager_options
def budgets(*, model: str, out: Path | None, manager: str, credentials: Credentials) -> None:
    """Show which KV heads of a model need the most slots, as measured over its sessions."""
    with reported(manager), ManagerClient(manager, credentials=credentials) as client:
        found = client.measured_profile(model)
    profile = Profile.of(found.model, list(found.shares), list(found.losses), found.layers, found.kv_heads)
    if out is not None:
        try:
            profile.save(out, {"command": "budgets", "model": found.model_name, "pairs": found.pairs})
        except OSError as error:
            raise click.ClickException(f"cannot write {out}: {error.strerror}") from error
    Console(markup=False).print(_table(found, profile))


def _table(found: MeasuredProfile, profile: Profile) -> Table:
    table = Table(
        title=f"{found.model_name}: {found.pairs:,} pairs of snapshots", title_justify="left", box=box.SIMPLE_HEAD
    )
    for name in ("Layer", "KV head", "Loss, times the mean"):
        table.add_column(name, justify="right")
    losses = {(layer, head): loss[0] for layer, heads in enumerate(profile.losses) for head, loss in enumerate(heads)}
    measured = sum(loss > 0 for loss in losses.values())
    mean = sum(losses.values()) / max(1, measured)
    for (layer, head), loss in sorted(losses.items(), key=lambda each: -each[1])[:_SHOWN]:
        if loss > 0:
            table.add_row(str(layer), str(head), f"{loss / mean:.2f}")
    return table
