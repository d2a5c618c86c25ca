"""What the supervisor and its children say, on standard error, each line with the name of who said it."""

import logging

from rich.console import Console
from rich.status import Status
from rich.text import Text

_STYLES = {"up": "bold", "store": "magenta", "manager": "cyan", "worker": "green"}
_NAME_WIDTH = 7


class Output:
    """Prints prefixed lines, and a spinner at a terminal while something is awaited."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

    def line(self, name: str, text: str) -> None:
        """Print one line of ``name``."""
        prefix = (f"{name:<{_NAME_WIDTH}} | ", _STYLES.get(name, "blue"))
        self._console.print(Text.assemble(prefix, text))

    def waiting(self, text: str) -> Status:
        """Return a context manager that shows a spinner at a terminal; elsewhere it prints nothing."""
        if not self._console.is_interactive:
            self.line("up", text)
        return self._console.status(text)


class OutputHandler(logging.Handler):
    """Sends log records to an :class:`Output`.

    Args:
        output: Where they go.
        name: Whose lines they are.
    """

    def __init__(self, output: Output, name: str) -> None:
        super().__init__()
        self._output = output
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, one line after the other."""
        for line in self.format(record).splitlines():
            self._output.line(self._name, line)
