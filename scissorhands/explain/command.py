"""The command ``scissorhands explain``."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from scissorhands.budget import BudgetRequest
from scissorhands.commands import click_errors, work, writable
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.commands.options import device_option, dtype_option, model_option
from scissorhands.policies import get_policy, policy_names

_NEW_TOKENS = 64


@click.command()
@model_option
@click.option("--prompt", help="The prompt. Give this or --prompt-file.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from this UTF-8 file, without its last line breaks.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=_NEW_TOKENS, show_default=True, help="Most tokens decoded."
)
@click.option("--policy", default="scissorhands", show_default=True, metavar="NAME[:PRESET]", help="Eviction policy.")
@click.option(
    "--budget",
    type=float,
    default=0.2,
    show_default=True,
    help="Share of prompt and new tokens that the cache may hold, above 0 and at most 1.",
)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The page to write.")
@dtype_option
@device_option
def explain(
    *,
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    max_new_tokens: int,
    policy: str,
    budget: float,
    out: Path,
    dtype: str,
    device: str,
) -> None:
    """Show what a budget remembers of a text.

    Reads a prompt through the cache as serving would, decodes greedily, and writes one HTML page: each token shaded by
    the share of layers and KV heads that still hold it, eviction by eviction.
    """
    with click_errors():
        asked: dict[str, Any] = {
            "model": model,
            "prompt": _prompt(prompt, prompt_file),
            "max_new_tokens": max_new_tokens,
            "policy": _checked(policy),
            "budget": BudgetRequest.fraction(budget),
            "dtype": dtype,
            "device": device,
        }
        writable(out, "out")
        runner = work("explain.run", command="explain", extra="torch")
        try:
            page = runner.run(runner.Request(**asked), Console(stderr=True))
        except InvalidRequestError as error:
            if prompt_file and error.field == "prompt":
                raise InvalidRequestError("prompt-file", error.description) from error
            raise
    try:
        size = out.write_bytes(page.encode())
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from error
    click.echo(f"{out}: {size / 1e6:.1f} MB; open it in a browser", err=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give either --prompt or --prompt-file")
    if file is None:
        return prompt or ""
    try:
        return file.read_bytes().decode().rstrip("\n")
    except OSError as error:
        raise InvalidRequestError("prompt-file", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError("prompt-file", f"{file} is not UTF-8 text (byte {error.start})") from error


def _checked(policy: str) -> str:
    """Return the policy; raises for one that there is not, before a model is loaded."""
    name, _, preset = policy.partition(":")
    try:
        get_policy(name, preset)
    except InvalidRequestError as error:
        allowed = ", ".join(policy_names())
        raise InvalidRequestError("policy", f"there is no {policy!r}; allowed: {allowed}") from error
    return policy
