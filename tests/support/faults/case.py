"""What a case is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """Something that goes wrong.

    Besides what it promises itself, every case promises that no token is wrong, no call hangs and nothing leaks.

    Args:
        name: Its name.
        fault: What goes wrong, in words.
        promised: What is promised then.
        run: Lets it go wrong; given a :class:`~support.faults.trial.Trial`.
        seconds: How long it may take.
        short: Whether the tests run it.
    """

    name: str
    fault: str
    promised: str
    run: Callable[[Any], Awaitable[None]]
    seconds: float = 60
    short: bool = False


def collector():
    """Return a list of cases and a decorator that adds to it; the case takes its name from its function."""
    cases: list[Case] = []

    def case(fault, promised, **more):
        def add(run):
            cases.append(Case(run.__name__.replace("_", "-"), fault, promised, run, **more))
            return run

        return add

    return cases, case
