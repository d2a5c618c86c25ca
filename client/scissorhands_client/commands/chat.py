"""``scissorhands chat``: a conversation whose history stays here and travels whole with every turn."""

import secrets
import sys
from collections.abc import Iterator
from typing import Any

import click
from prompt_toolkit import PromptSession
from rich.console import Console

from scissorhands.credentials import Credentials
from scissorhands_client.client import Client
from scissorhands_client.commands.failures import Failure, failure, reported
from scissorhands_client.commands.options import generation_options, read_options
from scissorhands_client.commands.summary import summary_line, summary_table
from scissorhands_client.commands.terminal import AnswerWriter, show_events
from scissorhands_client.errors import ClientError
from scissorhands_client.types import ChatMessage, GenerateOptions, Result

_HELP = "/exit ends, /reset forgets the conversation, /stats shows the last answer's statistics, Ctrl-C stops an answer"


@click.command()
@click.option("--system", metavar="TEXT", help="A system message that opens the conversation.")
@click.option(
    "--keep/--no-keep",
    default=True,
    show_default=True,
    help="Keep the cache between turns, so that only what is new is read.",
)
@click.option("--quiet", is_flag=True, help="Print only the answers: no progress, no statistics.")
@generation_options
def chat(
    *,
    system: str | None,
    keep: bool,
    quiet: bool,
    server: str,
    timeout: float,
    credentials: Credentials,
    **options: Any,
) -> None:
    """Talk with the model. Each line is one turn; lines can also be piped in.

    /exit ends, /reset forgets the conversation, /stats shows the last answer's statistics.
    Ctrl-C stops an answer, and takes its turn out of the conversation.

    Piped in, the first failure ends the command: exit code 2 for a bad request, 1 for any other.
    """
    # One id for the whole conversation, also after /reset: what was kept before is then replaced.
    chosen = read_options(session_id=secrets.token_urlsafe(18) if keep else "", **options)
    console = Console(stderr=True, markup=False)
    interactive = sys.stdin.isatty()
    with reported(server), Client(server, timeout=timeout, credentials=credentials) as client:
        served = client.get_model()
        if not served.chat:
            raise Failure(f"{served.model.name} has no chat template; use 'scissorhands generate' instead")
        if interactive and not quiet:
            console.print(f"{served.model.name} at {server}: {_HELP}", highlight=False, soft_wrap=True)
        conversation = _Conversation(client, chosen, console, system=system, quiet=quiet)
        for line in _typed_lines() if interactive else _piped_lines():
            if line == "/exit":
                break
            try:
                _take(conversation, line)
            except ClientError as error:
                if not interactive:
                    raise
                failure(error, server).show()
            except KeyboardInterrupt:
                if not interactive:
                    raise
                console.print("stopped; the turn is forgotten")


class _Conversation:
    """The turns so far, and what the last answer cost.

    Args:
        client: Where answers come from.
        options: What decides every answer.
        console: Where progress and statistics go.
        system: System message, or None.
        quiet: Show no progress and no statistics.
    """

    def __init__(
        self, client: Client, options: GenerateOptions, console: Console, *, system: str | None, quiet: bool
    ) -> None:
        self._client = client
        self._options = options
        self._console = console
        self._quiet = quiet
        self._opening = [] if system is None else [ChatMessage("system", system)]
        self._turns: list[ChatMessage] = []
        self._last: Result | None = None

    def reset(self) -> None:
        """Forget every turn."""
        self._turns.clear()
        self._console.print("the conversation starts anew")

    def show_statistics(self) -> None:
        """Show what the last answer cost."""
        self._console.print("no answer yet" if self._last is None else summary_table(self._last))

    def say(self, text: str) -> None:
        """Send a turn and show its answer; unless it completes, the turn is forgotten.

        Raises:
            ClientError: There is no complete answer.
        """
        asked = [*self._turns, ChatMessage("user", text)]
        with self._client.generate([*self._opening, *asked], self._options) as stream, AnswerWriter() as out:
            self._last = show_events(stream, out.write, self._console, quiet=self._quiet)
        self._turns = [*asked, ChatMessage("assistant", self._last.text)]
        if not self._quiet:
            self._console.print(summary_line(self._last), style="dim", highlight=False, soft_wrap=True)


def _take(conversation: _Conversation, line: str) -> None:
    if line == "/reset":
        conversation.reset()
    elif line == "/stats":
        conversation.show_statistics()
    elif line.startswith("/"):
        click.echo(f"unknown command; {_HELP}", err=True)
    elif line:
        conversation.say(line)


def _typed_lines() -> Iterator[str]:
    session: PromptSession[str] = PromptSession("> ")
    while True:
        try:
            yield session.prompt().strip()
        except KeyboardInterrupt:
            continue  # Ctrl-C clears the line, as in a shell.
        except EOFError:
            return


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        try:
            yield line.decode().strip()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"standard input is not UTF-8 text: {error}") from error
