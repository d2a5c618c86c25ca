"""``scissorhands generate``: one prompt, one answer."""

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from scissorhands.credentials import Credentials
from scissorhands_client.client import Client
from scissorhands_client.commands.failures import Failure, reported
from scissorhands_client.commands.options import generation_options, read_options
from scissorhands_client.commands.summary import result_object, summary_table, to_json
from scissorhands_client.commands.terminal import AnswerWriter, show_events, write_text
from scissorhands_client.types import ChatMessage, Prompt


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from this UTF-8 file, without its last line breaks. PROMPT, if given too, follows after an "
    "empty line.",
)
@click.option("--chat/--no-chat", default=False, help="Put the prompt into the model's chat template as a user's turn.")
@click.option(
    "--session",
    "session_id",
    default="",
    metavar="ID",
    help="Keep the cache for a next prompt that begins with this one and its answer, under this id: letters, digits, _ "
    "and -, hard to guess.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the answer and all statistics.")
@click.option("--quiet", is_flag=True, help="Print only the answer: no progress, no table.")
@generation_options
def generate(
    *,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    as_json: bool,
    quiet: bool,
    server: str,
    timeout: float,
    credentials: Credentials,
    **options: Any,
) -> None:
    """Answer PROMPT, streaming the text to standard output; everything else goes to standard error.

    PROMPT is read from standard input when it is "-".

    Exit codes: 0 when answered, 2 for a bad request, 130 after Ctrl-C, 1 for any other failure.
    """
    chosen = read_options(**options)
    console = Console(stderr=True, markup=False)
    with reported(server):
        text = _read_prompt(prompt, file)
        asked: Prompt = [ChatMessage("user", text)] if chat else text
        with (
            Client(server, timeout=timeout, credentials=credentials) as client,
            client.generate(asked, chosen) as stream,
            AnswerWriter() as out,
        ):
            result = show_events(stream, _ignore if as_json else out.write, console, quiet=quiet)
    if as_json:
        write_text(to_json(result_object(result)) + "\n")
    elif not quiet:
        console.print(summary_table(result))


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is None and file is None:
        raise click.UsageError('give a PROMPT ("-" reads standard input) or --file')
    parts = []
    if file is not None:
        parts.append(_decoded(_file_bytes(file), str(file)).rstrip("\n"))
    if prompt is not None:
        parts.append(_decoded(sys.stdin.buffer.read(), "standard input") if prompt == "-" else prompt)
    return "\n\n".join(parts)


def _file_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Failure(f"cannot read the prompt: {error}") from error


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source} is not UTF-8 text: {error}") from error


def _ignore(text: str) -> None:
    del text
