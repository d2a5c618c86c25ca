"""Running ``calibrate``: from what was asked to the profile."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scissorhands.budget import BudgetRequest, Grant, ModelShape
from scissorhands.calibration.fisher import record
from scissorhands.calibration.quantize import bit_losses
from scissorhands.calibration.replay import Losses, head_losses, one_layer
from scissorhands.calibration.transforms import Moments, moments
from scissorhands.codec import Statistics
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


def run(request: Request, console: Console) -> tuple[Profile, Statistics, dict[str, Any]]:
    """Measure a model; ``console`` shows how far it is.

    Args:
        request: What to measure; its choices are one policy at the budgets of the profile.
        console: Where progress is shown.

    Returns:
        The profile, what codecs are fitted to, and how both were measured.

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
    settings = setup.results(
        "calibrate",
        policy=request.choices[0].policy,
        grants=[grant_text(each) for each in grants.values()],
        samples=SAMPLES,
        seed=SEED,
    )
    weights, sequences = settings.settings["weights_sha256"], torch.from_numpy(setup.sequences()).to(setup.model.device)
    statistics = _statistics(setup, sequences, weights)
    losses, *by_bits = _measured(setup, sequences, statistics, list(grants.values()), console)
    # Estimates have noise; more slots never make it worse.
    evicting = _all_layers(np.minimum.accumulate(losses, axis=-1), shape).ravel().tolist()
    storing = _all_layers(np.concatenate(by_bits, axis=-1), shape).ravel().tolist()
    profile = Profile.of(weights, list(grants), evicting, shape.layers, shape.kv_heads, storing)
    about = {
        **settings.settings,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": settings.environment,
    }
    return profile, statistics, about


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


def _statistics(setup: Setup, sequences: torch.Tensor, weights: str) -> Statistics:
    """Return what codecs are fitted to, from ``[sequences, length]`` tokens; ``weights`` is the model's digest."""
    shape = setup.shape
    found: Moments | None = None
    for tokens in sequences:
        own = moments(record(setup.model, shape, tokens, torch.zeros(0, len(tokens))), shape)
        found = own if found is None else found + own
    assert found is not None
    config = setup.model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {"partial_rotary_factor": 0.0}
    tensors = found.tensors(rotary=rope.get("partial_rotary_factor", 1.0) == 1.0)
    return Statistics(tensors, {"weights_sha256": weights, "command": "calibrate"})


def _measured(
    setup: Setup, sequences: torch.Tensor, statistics: Statistics, grants: list[Grant], console: Console
) -> tuple[Losses, Losses, Losses]:
    """Return losses of evicting ``[global layers, kv_heads, grants]``, and of fewer bits of keys and of values."""
    shape, device = setup.shape, setup.model.device
    layer = one_layer(shape)
    # On the CPU, so that every device draws from the same numbers.
    draws = torch.rand(len(sequences), SAMPLES, sequences.shape[1], generator=torch.Generator().manual_seed(SEED))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    found = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(sequences) * len(shape.global_layers) * (len(grants) + 1))
        for index, tokens in enumerate(sequences):
            progress.update(task, description=f"sequence {index + 1} of {len(sequences)}")
            # One at a time, and not kept: queries and gradients take more than the cache.
            recording = record(setup.model, shape, tokens, draws[index])
            evicting = head_losses(recording, layer, grants, device, lambda done: progress.advance(task, done))
            storing = bit_losses(recording, layer, statistics, device, lambda done: progress.advance(task, done))
            found.append((evicting, *storing))
            if not console.is_terminal:
                console.print(f"{index + 1} of {len(sequences)} sequences", highlight=False)
    evicting, of_keys, of_values = (np.mean(parts, axis=0) for parts in zip(*found, strict=True))
    return evicting, of_keys, of_values


def _all_layers(losses: Losses, shape: ModelShape) -> Losses:
    """Return losses of all layers; a sliding layer costs nothing."""
    found = np.zeros((shape.layers, *losses.shape[1:]))
    found[list(shape.global_layers)] = losses
    return found
