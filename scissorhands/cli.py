"""The command ``scissorhands``: its subcommands are entry points, so that each package brings its own."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

import click

from scissorhands import __version__

GROUP = "scissorhands.commands"


class EntryPointGroup(click.Group):
    """A group whose subcommands are the entry points of ``scissorhands.commands``, loaded when they are named."""

    def _found(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        del ctx
        return sorted(self._found())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one subcommand; a package that is not installed is an error that says how to install it."""
        del ctx
        entry = self._found().get(cmd_name)
        if entry is None:
            return None
        try:
            command: click.Command = entry.load()
        except ModuleNotFoundError as error:
            return _missing(cmd_name, str(error.name))
        return command


def _missing(command: str, module: str) -> click.Command:
    @click.command(
        command,
        short_help=f"(not installed: needs {module})",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def missing(arguments: Sequence[str]) -> None:
        del arguments
        raise click.ClickException(f"{command} needs the module {module}: pip install 'scissorhands[all]'")

    return missing


@click.group(cls=EntryPointGroup)
@click.version_option(__version__, prog_name="scissorhands")
def main() -> None:
    """Serve language models under a hard KV-cache budget."""


if __name__ == "__main__":
    main()
