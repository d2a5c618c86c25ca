"""The command blocks and the Python blocks of the README and of everything under docs/."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The generated references show no commands to run but every option that there is.
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/README.md", "benchmarks/peers/README.md")
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT).as_posix() not in {"docs/commands.md", "docs/configuration.md", "docs/api.md"}
)

# Blocks that begin so are no commands.
NO_COMMANDS = {
    "client ──": "a drawing",
    "you ────": "a drawing",
    "budget 20%   in /metrics": "what `make demo` prints",
    "# docker/manager.env": "variables of a container",
    "# docker/worker.env": "variables of a container",
    "# tokens.toml": "a server's file, with which the tests of callers run",
    "ACL SETUSER": "Redis's configuration, with which the tests of the store's access run",
}

# Commands that begin so are not run by the test, but checked: their options, their targets, their files.
NOT_RUN = {
    "make": "installs, fetches or tests everything",
    "git": "fetches this repository",
    "docker": "needs a container engine",
    "python -m benchmarks": "measures for minutes",
    "python scripts/fetch_texts.py": "fetches texts",
    "scissorhands eval": "measures for minutes to hours",
    "scissorhands advise": "measures for a minute even where the model is tiny",
    "scissorhands calibrate": "measures for minutes",
    "scissorhands up": "runs until it is stopped; the tests' own system is this command, on free ports",
    "scissorhands worker": "runs until it is stopped",
    "scissorhands manager": "runs until it is stopped",
    "scissorhands top": "runs until it is stopped",
    "redis-server": "runs until it is stopped",
    "prometheus": "runs until it is stopped",
}


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page: Its page, below the root.
        line: Its first line's number.
        text: What it says, without the indentation.
        language: What its fence says; empty for one that is indented.
    """

    page: str
    line: int
    text: str
    language: str

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def commands(self):
        """Its commands: lines, put together where a backslash ends one, and cut at pipes and ``&&``."""
        joined = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines() if not line.strip().startswith("#")]
        return [part.strip() for line in lines for part in re.split(r" \| |\|$|&&", line) if part.strip()]

    @property
    def reason_not_run(self):
        """Why it is not run; None if it is."""
        for command in self.commands:
            for start, reason in NOT_RUN.items():
                if command == start or command.startswith((f"{start} ", f"{start}.")):
                    return reason
        return None


def blocks():
    """Return all blocks that are commands or Python; fail if one is neither, nor listed in ``NO_COMMANDS``."""
    found = [block for page in PAGES for block in _blocks(page)]
    return [block for block in found if not block.text.lstrip().startswith(tuple(NO_COMMANDS))]


def _blocks(page):
    name = page.relative_to(ROOT).as_posix()
    fence, start, lines = None, 0, []
    previous = ""
    # A last empty line ends a block at the end of the page.
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], 1):
        if fence is not None:
            if line.startswith("```"):
                yield Block(name, start, "\n".join(lines), fence)
                fence, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("```"):
            fence, start = line.removeprefix("```").strip(), number
        elif line.startswith("    ") and (lines or not previous.strip()):
            start = start if lines else number
            lines.append(line[4:])
        elif lines:
            yield Block(name, start, "\n".join(lines), "")
            lines = []
        previous = line
