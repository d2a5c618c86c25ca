"""Losses as fields of results: of the full cache, and of a row compared to it."""

import base64
from typing import Any

import numpy as np

from scissorhands.evaluation import statistics
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.statistics import Losses


def full_fields(losses: Losses) -> Row:
    """Return what a file reports of the full cache; ``losses`` are ``[sequences, length - 1]`` in nats."""
    # Little-endian float32: later cells are compared to it.
    packed = base64.b64encode(losses.astype("<f4").tobytes()).decode("ascii")
    return {"perplexity": statistics.perplexity(losses), **_sums(losses, ""), "losses": packed}


def full_losses(results: Results) -> Losses:
    """Return the losses of the full cache, ``[sequences, length - 1]`` in nats.

    Raises:
        ValueError: They are not of this shape.
        KeyError: There are none.
        TypeError: They are something else.
    """
    packed = base64.b64decode(results.full["losses"], validate=True)
    shape = (results.settings["sequences"], results.settings["length"] - 1)
    return np.frombuffer(packed, dtype="<f4").reshape(shape)


def loss_fields(losses: Losses, first_eviction: int | None, full: Losses) -> Row:
    """Return what a row reports of its losses.

    Args:
        losses: ``[sequences, length - 1]`` in nats.
        first_eviction: The first column that an eviction affects; None if nothing was evicted.
        full: The losses of the full cache, of the same shape.
    """
    row: dict[str, Any] = {
        "perplexity": statistics.perplexity(losses),
        "increase_percent": statistics.increase_percent(losses, full),
        "ci95": statistics.interval_percent(losses, full),
        **_sums(losses, ""),
        "first_eviction": first_eviction,
        "increase_percent_after_eviction": None,
        "ci95_after_eviction": None,
    }
    if first_eviction is not None:
        after, full_after = losses[:, first_eviction:], full[:, first_eviction:]
        row["increase_percent_after_eviction"] = statistics.increase_percent(after, full_after)
        row["ci95_after_eviction"] = statistics.interval_percent(after, full_after)
        row |= _sums(after, "_after_eviction")
    return row


def _sums(losses: Losses, suffix: str) -> Row:
    """Return what a comparison in pairs needs: of each sequence the sum of its losses, and of how many."""
    return {
        f"loss_sums{suffix}": losses.sum(axis=1, dtype=np.float64).tolist(),
        f"loss_count{suffix}": losses.shape[1],
    }
