"""Shows an answer while it comes: progress on standard error, text on standard output."""

import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scissorhands_client.collector import Collector
from scissorhands_client.types import Accepted, Delta, Event, PrefillProgress, Result


class AnswerWriter:
    """Writes the text of an answer to standard output and leaves it at the start of a line."""

    def __init__(self) -> None:
        self._open_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open_line:
            write_text("\n")

    def write(self, text: str) -> None:
        """Write a piece of the answer."""
        write_text(text)
        if text:
            self._open_line = not text.endswith("\n")


def write_text(text: str) -> None:
    """Write to standard output; characters that it cannot show are replaced."""
    encoding = sys.stdout.encoding
    click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)


def show_events(events: Iterable[Event], write: Callable[[str], None], console: Console, *, quiet: bool) -> Result:
    """Show events as they come and collect the answer.

    Args:
        events: The events of one answer.
        write: Told every piece of text.
        console: Where progress is shown.
        quiet: Show no progress.

    Raises:
        ClientError: The events end in an error.
    """
    collector = Collector()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    # The bar is gone before the first text, so that both can share a terminal. Elsewhere it would write blank lines.
    hidden = quiet or not console.is_interactive
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("connecting", total=None)
        for event in events:
            collector.add(event)
            if isinstance(event, Accepted):
                ahead = event.queued_ahead
                waiting = f"queued behind {ahead}" if ahead else "reading the prompt"
                progress.update(task, description=waiting, total=event.prompt_tokens)
            elif isinstance(event, PrefillProgress):
                progress.update(task, description="reading the prompt", completed=event.done, total=event.total)
            elif isinstance(event, Delta):
                progress.stop()
                write(event.text)
    return collector.result()
