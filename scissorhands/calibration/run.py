"""Running ``calibrate``: from what was asked to the profile."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scissorhands.budget import BudgetRequest, Grant, ModelShape
from scissorhands.calibration.fisher import record
from scissorhands.calibration.replay import Losses, head_losses, one_layer
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.request import Request
from scissorhands.evaluation.setup import Setup, prepare
from scissorhands.evaluation.table import Table
from scissorhands.grant import PolicyRequest, grant, grant_text
from scissorhands.policies.full import Full
from scissorhands.profile import Profile

# Tokens drawn at each position, and the seed of the draws.
SAMPLES = 2
SEED = 0
# Shares of the table, as far as they were measured; the second one ranks the heads.
_SHOWN = (0.125, 0.2, 0.3333)
# Losses are shown in thousandths of a nat.
_MILLI = 1000.0


def run(request: Request, console: Console) -> tuple[Profile, dict[str, Any]]:
    """Measure a model; ``console`` shows how far it is.

    Args:
        request: What to measure; its choices are one policy at the budgets of the profile.
        console: Where progress is shown.

    Returns:
        The profile, and how it was measured.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
        EngineError: The model's attention is not finite.
    """
    setup = prepare(request)
    shape = setup.shape
    if not shape.global_layers:
        raise InvalidRequestError("model", "has only sliding layers, from which nothing is ever evicted")
    grants = _grants(request, one_layer(shape))
    losses = _measured(setup, list(grants.values()), console)
    settings = setup.results(
        "calibrate",
        policy=request.choices[0].policy,
        grants=[grant_text(each) for each in grants.values()],
        samples=SAMPLES,
        seed=SEED,
    )
    about = {
        **settings.settings,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": settings.environment,
    }
    shares = list(grants)
    flat = _all_layers(losses, shape).ravel().tolist()
    return Profile.of(settings.settings["weights_sha256"], shares, flat, shape.layers, shape.kv_heads), about


def table(profile: Profile) -> Table:
    """Return what eviction costs in each layer, and in which of its heads most and least."""
    shown = [share for share in _SHOWN if share in profile.shares] or [profile.shares[0]]
    ranked = profile.shares.index(shown[len(shown) // 2])
    headings = [f"mnat/token at {share:.3g}" for share in shown]
    lines = []
    for layer, heads in enumerate(profile.losses):
        if not any(map(any, heads)):
            continue  # It slides.
        sums = [sum(head[profile.shares.index(share)] for head in heads) for share in shown]
        order = sorted(range(len(heads)), key=lambda head: heads[head][ranked])
        extremes = [f"{head}: {_MILLI * heads[head][ranked]:.3f}" for head in (order[-1], order[0])]
        lines.append((str(layer), *(f"{_MILLI * total:.3f}" for total in sums), *extremes))
    at = f"at {profile.shares[ranked]:.3g}"
    return Table(("layer", *headings, f"most sensitive head {at}", f"least {at}"), lines)


def _grants(request: Request, shape: ModelShape) -> dict[float, Grant]:
    """Return the grant of each share that is as small as it says; a policy raises budgets that it cannot work with.

    Raises:
        InvalidRequestError: The policy evicts nothing, or the sequences are too short for all but one share.
    """
    if request.choices[0].policy == Full.name:
        raise InvalidRequestError("policy", f"{Full.name} evicts nothing; choose another")
    found = {}
    for choice in request.choices:
        name, _, preset = choice.policy.partition(":")
        granted = grant(BudgetRequest.fraction(choice.budget), PolicyRequest(name, preset), shape, request.length)
        if not granted.raised:
            found[choice.budget] = granted
    if len(found) < 2:  # noqa: PLR2004 - a curve has at least two points
        raise InvalidRequestError(
            "length", f"too short for {request.choices[0].policy}, whose budgets cannot be that small: longer sequences"
        )
    return found


def _measured(setup: Setup, grants: list[Grant], console: Console) -> Losses:
    """Return ``[global layers, kv_heads, grants]``, the mean over the sequences."""
    shape, device = setup.shape, setup.model.device
    sequences = torch.from_numpy(setup.sequences()).to(device)
    # On the CPU, so that every device draws from the same numbers.
    draws = torch.rand(len(sequences), SAMPLES, sequences.shape[1], generator=torch.Generator().manual_seed(SEED))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    total = np.zeros((len(shape.global_layers), shape.kv_heads, len(grants)))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(sequences) * len(shape.global_layers) * len(grants))
        for index, tokens in enumerate(sequences):
            progress.update(task, description=f"sequence {index + 1} of {len(sequences)}")
            # One at a time, and not kept: queries and gradients take more than the cache.
            total += head_losses(
                record(setup.model, shape, tokens, draws[index]),
                one_layer(shape),
                grants,
                device,
                lambda done: progress.advance(task, done),
            )
            if not console.is_terminal:
                console.print(f"{index + 1} of {len(sequences)} sequences", highlight=False)
    return total / len(sequences)


def _all_layers(losses: Losses, shape: ModelShape) -> Losses:
    """Return losses of all layers, rising with no share; a sliding layer costs nothing."""
    found = np.zeros((shape.layers, *losses.shape[1:]))
    # Estimates have noise; more slots never make it worse.
    found[list(shape.global_layers)] = np.minimum.accumulate(losses, axis=-1)
    return found
