"""Statistics of losses: the relative increase of perplexity and its bootstrap interval."""

import math

import numpy as np
import numpy.typing as npt

# Negative log likelihoods in nats, [sequences, positions].
Losses = npt.NDArray[np.floating]
# Differences of two mean losses of the same sequences in nats, [sequences].
Differences = npt.NDArray[np.float64]

RESAMPLES = 10_000
SEED = 0
_TAILS = (2.5, 97.5)
# The same of the normal distribution, in standard deviations.
_NORMAL = 1.959964
# One sequence says nothing about the spread between sequences.
_FEWEST_SEQUENCES = 2


def perplexity(losses: Losses) -> float:
    """Return the exponential of the mean loss."""
    return float(np.exp(losses.mean(dtype=np.float64)))


def increase_percent(losses: Losses, reference: Losses) -> float:
    """Return by how much the perplexity exceeds that of ``reference``, in percent of it."""
    return float(_percent(losses.mean(dtype=np.float64) - reference.mean(dtype=np.float64)))


def interval_percent(
    losses: Losses, reference: Losses, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float] | None:
    """Return the 95 % interval of :func:`increase_percent`, by a percentile bootstrap over sequences.

    Both losses of a sequence are drawn together, since they are of the same text.

    Args:
        losses: What is compared.
        reference: What it is compared to, of the same sequences and positions.
        resamples: How often the sequences are drawn.
        seed: Of the draws; equal seeds give equal intervals.

    Returns:
        Both ends, in percent, or None for fewer than two sequences.
    """
    differences = losses.mean(axis=1, dtype=np.float64) - reference.mean(axis=1, dtype=np.float64)
    return interval_of_pairs(differences, resamples, seed)


def percent_of_pairs(differences: Differences) -> float:
    """Return by how much the perplexity is higher, in percent, from the differences of mean losses of sequences."""
    return float(_percent(differences.mean()))


def interval_of_pairs(
    differences: Differences, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float] | None:
    """Return the 95 % interval of :func:`percent_of_pairs`, by a percentile bootstrap over sequences.

    Args:
        differences: Of each sequence, the mean loss minus that of what it is compared to.
        resamples: How often the sequences are drawn.
        seed: Of the draws; equal seeds give equal intervals.

    Returns:
        Both ends, in percent, or None for fewer than two sequences.
    """
    ends = interval_of_means(differences, resamples, seed)
    return None if ends is None else (float(_percent(np.float64(ends[0]))), float(_percent(np.float64(ends[1]))))


def interval_of_means(
    values: npt.NDArray[np.float64], resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of sequences' ``values``, by a percentile bootstrap over sequences.

    Args:
        values: One of each sequence.
        resamples: How often the sequences are drawn.
        seed: Of the draws; equal seeds give equal intervals.

    Returns:
        Both ends, or None for fewer than two sequences.
    """
    if len(values) < _FEWEST_SEQUENCES:
        return None
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), _TAILS)
    return float(low), float(high)


def _percent(difference: np.float64) -> np.float64:
    return np.float64(100 * np.expm1(difference))


def share_interval(found: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``trials`` independent cases (Wilson's score interval)."""
    share, square = found / trials, _NORMAL**2
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = _NORMAL / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)
