"""The options that commands share: those of ``generate`` and ``chat``, and the manager's address."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from scissorhands.credentials_options import credentials_options
from scissorhands_client.budget import Budget
from scissorhands_client.channel import DEFAULT_MANAGER, DEFAULT_WORKER, GENERATE_TIMEOUT
from scissorhands_client.errors import InvalidRequestError
from scissorhands_client.types import GenerateOptions, Policy, Priority

Command = TypeVar("Command", bound=Callable[..., Any])


class BudgetType(click.ParamType[Budget]):
    """A budget: ``20%``, ``0.2``, ``256``, ``64MiB`` or ``20x``."""

    name = "budget"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Budget:
        """Read the text."""
        if isinstance(value, Budget):
            return value
        try:
            return Budget.parse(value)
        except InvalidRequestError as error:
            self.fail(error.allowed, param, ctx)


class ParameterType(click.ParamType[tuple[str, int]]):
    """One number of a policy: ``NAME=VALUE``."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Read the text."""
        name, separator, number = str(value).partition("=")
        if not (name and separator and number.isascii() and number.isdecimal()):
            self.fail(f"give NAME=VALUE with a whole number, such as recent=64, got {value!r}", param, ctx)
        return name, int(number)


# What decides an answer besides the prompt; `generate` and `chat` take them all.
_OPTIONS = (
    click.option(
        "--server",
        metavar="HOST:PORT",
        default=DEFAULT_WORKER,
        show_default=True,
        envvar="SCISSORHANDS_CLIENT_SERVER",
        show_envvar=True,
        help="Address of the worker; of several, ipv4:HOST:PORT,HOST:PORT, any may answer.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True, max=86400),
        metavar="SECONDS",
        default=GENERATE_TIMEOUT,
        show_default=True,
        help="Longest time for one answer.",
    ),
    click.option("--model", default="", help="Name of the model; without it, the one that the worker serves."),
    click.option(
        "--budget",
        type=BudgetType(),
        metavar="AMOUNT",
        help="Most that the cache may hold: a share of the whole length (20% or 0.2), tokens (256), bytes (64MiB), or "
        "how many times smaller than a full 16-bit cache, all bytes counted (20x). Without it, the server's default.",
    ),
    click.option(
        "--resident-codec",
        default="",
        metavar="NAME",
        help="Format that the slots of the cache are packed in, such as int4 or turboquant:k4v3; none holds them as "
        "they are, planned lets the model's profile choose slots and bits. Without it, the server's default.",
    ),
    click.option(
        "--policy", metavar="NAME[:PRESET]", help="Eviction policy, such as scissorhands, scissorhands:paper or h2o."
    ),
    click.option(
        "--param",
        "parameters",
        type=ParameterType(),
        metavar="NAME=VALUE",
        multiple=True,
        help="One of its numbers: recent, sinks, drop, lookahead, chunk, window or tail. Repeatable; needs --policy.",
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="Most tokens to generate. Without it, the server's default.",
    ),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="Softmax temperature; 0 is greedy."),
    click.option("--top-p", type=float, help="Nucleus mass kept, above 0 and at most 1."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Most likely tokens kept; 0 keeps all."),
    click.option("--repetition-penalty", type=float, help="Penalty on tokens already seen; 1 penalizes nothing."),
    click.option("--seed", type=int, help="Seed of the random numbers. Without it, one is drawn and reported."),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End before the first of these that appears. Repeatable."
    ),
    click.option("--ignore-eos", is_flag=True, help="Continue past end-of-sequence tokens."),
    click.option(
        "--priority",
        type=click.Choice(Priority, case_sensitive=False),
        default=Priority.NORMAL,
        show_default="normal",
        help="How urgent this is: the more urgent come first, and may make a less urgent answer pause.",
    ),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=True,
        help="Take what the prompt begins with from the store if it was read before, and leave it there for others.",
    ),
    click.option(
        "--recall",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Bring evicted tokens back where the end of the prompt asks for them: at most this share of the budget, "
        "such as 0.25.",
    ),
    click.option(
        "--recall-every",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Bring tokens back again after every N tokens of the answer; needs --recall.",
    ),
    click.option(
        "--shadow/--no-shadow",
        default=None,
        help="Compare the answer with what a full cache would have said; this takes a full cache's memory. Without "
        "it, the server decides.",
    ),
)


_manager_option = click.option(
    "--manager",
    metavar="HOST:PORT",
    default=DEFAULT_MANAGER,
    show_default=True,
    envvar="SCISSORHANDS_CLIENT_MANAGER",
    show_envvar=True,
    help="Address of the cache manager.",
)


def manager_options(command: Command) -> Command:
    """Add the options that say which manager is called, and how: ``manager`` and ``credentials``."""
    return _manager_option(credentials_options(command))


def generation_options(command: Command) -> Command:
    """Add the shared options to a command. Its keyword arguments go to :func:`read_options`."""
    command = credentials_options(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_options(
    *, policy: str | None, parameters: tuple[tuple[str, int], ...], stop: tuple[str, ...], **others: Any
) -> GenerateOptions:
    """Turn the values of the options that decide an answer into the client's options.

    Raises:
        click.UsageError: Parameters are given without a policy, or when to recall without how much.
    """
    if parameters and policy is None:
        raise click.UsageError("--param needs --policy, whose numbers it overrides")
    if others["recall_every"] and others["recall"] is None:
        raise click.UsageError("--recall-every needs --recall, the share that may be brought back")
    chosen = None if policy is None else Policy.parse(policy, dict(parameters))
    return GenerateOptions(policy=chosen, stop=stop, **others)
