"""The command ``scissorhands eval``, one file for each subcommand.

A subcommand's file declares its options and names the module that does the work, which may import torch: looking at
the help, or naming a wrong option, must not take the seconds that torch takes to import.
"""

import click

from scissorhands.evaluation.commands import agreement, needle, oracle, passkey, perplexity, persistence, report

_SUBCOMMANDS = [
    agreement.command,
    needle.command,
    oracle.command,
    passkey.command,
    perplexity.command,
    persistence.command,
    report.command,
]


@click.group("eval", commands=_SUBCOMMANDS)
def evaluate() -> None:
    """Measure what a budget costs."""
