"""Demand: how much each KV head of a model needs slots, measured from the snapshots of all its sessions.

Calibration (:mod:`scissorhands.calibration`) measures what eviction costs; this estimates it from what a manager sees
anyway. Between two successive snapshots of a row, a head's *surprise* is the attention that came to slots which had
mattered little: they would be evicted first, so importance did not persist there. The heads that lose by eviction look
far back at a single token now and then, so the slot with the most of that attention counts, and its square, as in the
expansion of the divergence. How much attention falls on what would be evicted tells nothing: heads that attend evenly
to all tokens drop the most of it, and lose next to nothing. All of this was decided by measurement
(``docs/quality.md``, "Budgets that the manager measures").

One number a head is enough, since the heads' losses fall alike, about with one over their slots: it makes a
:class:`~scissorhands.profile.Profile`, by which budgets are shared like by a calibrated one.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scissorhands.budget import ModelShape
from scissorhands.importance import Attention
from scissorhands.profile import Profile

Surprises = npt.NDArray[np.float64]

# Sums over many queries hide how sharp one was, so pairs of snapshots further apart, as in a prompt, tell too little.
_MOST_QUERIES = 32
# Of the slots that two snapshots share, the newest fifth is not looked at: it is exempt from eviction.
_OLDER = 0.8
# Shares of a sequence at which a profile tells losses; between them it draws lines in logarithms.
_SHARES = (0.05, 0.1, 0.2, 0.4, 0.7)
# Pairs of snapshots that the mean looks back on, about: older ones fade.
_MEMORY = 1024
# Models that are remembered; the one that learned least lately is forgotten first.
_MODELS = 16


def surprise(before: Attention, after: Attention) -> Surprises | None:
    """Return of each KV head how sharply it attended, between two snapshots of a row, to what had mattered little.

    Of the slots that the snapshots share, those count which are in the older four fifths and, of these, in the half
    with the least attention per query by the first snapshot. Heads need not have equally many slots: one with fewer
    holds only what matters more to it. Its surprise falls about with one over its slots, so it is multiplied by them,
    relative to the mean.

    Returns:
        ``[heads]``, those of the layers with slots, layer by layer: the most attention per query that one slot
        received, squared. None when a head has too few slots in common, or the snapshots are too far apart.
    """
    queries = after.step - before.step
    if not 0 < queries <= _MOST_QUERIES:
        return None
    found, lengths = [], []
    layers = zip(before.positions, before.mass, after.positions, after.mass, strict=True)
    for heads in layers:
        for positions, mass, new_positions, new_mass in zip(*heads, strict=True):
            # Positions ascend, so the places of those that are shared are found without sorting.
            places = np.minimum(np.searchsorted(new_positions, positions), len(new_positions) - 1)
            shared = np.flatnonzero(new_positions[places] == positions)
            lengths.append(len(shared))
            older = shared[: int(len(shared) * _OLDER)]
            observed = before.step - positions[older].astype(np.int64)
            least = np.argsort(mass[older] / observed, kind="stable")[: len(older) // 2]
            if not len(least):
                return None
            least = older[least]
            received = new_mass[places[least]].astype(np.float64) - mass[least]
            # A query gives a slot at most 1; sums of float32 numbers may fall by a rounding error.
            found.append(min(1.0, max(0.0, float(received.max()) / queries)) ** 2)
    if not found:
        return None
    slots = np.array(lengths, dtype=np.float64)
    scaled: Surprises = np.array(found) * slots / slots.mean()
    return scaled


@dataclass
class Demand:
    """What is known of a model. Only :class:`Demands` changes it.

    Args:
        name: Name under which it was served last.
        shape: Its sizes.
        surprises: ``[global heads]``, mean over the pairs of snapshots, the latest weighing most.
        pairs: Pairs of snapshots so far.
        profile: The profile in use; None before the first.
    """

    name: str
    shape: ModelShape
    surprises: Surprises
    pairs: int = 0
    profile: Profile | None = None


class Demands:
    """The demand of the models that were served lately. A model is its fingerprint and its sizes.

    Args:
        renewal: Pairs of snapshots after which a profile is made anew. Until then, equal requests get equal budgets,
            and how they are shared is worked out once.
    """

    def __init__(self, renewal: int) -> None:
        self._renewal = renewal
        self._models: OrderedDict[tuple[str, ModelShape], Demand] = OrderedDict()

    def learn(self, model: str, name: str, shape: ModelShape, surprises: Surprises) -> None:
        """Take a pair of snapshots into a model's mean.

        Args:
            model: Fingerprint of the model; nothing is learned of one without.
            name: Its name, for people.
            shape: Its sizes.
            surprises: What :func:`surprise` found.
        """
        if not model or len(surprises) != len(shape.global_layers) * shape.kv_heads:
            return
        known = self._models.setdefault((model, shape), Demand(name, shape, np.zeros(len(surprises))))
        known.name = name
        self._models.move_to_end((model, shape))
        if len(self._models) > _MODELS:
            self._models.popitem(last=False)
        known.pairs += 1
        known.surprises += (surprises - known.surprises) / min(known.pairs, _MEMORY)
        if known.pairs % self._renewal == 0:
            known.profile = _profile(model, shape, known.surprises)

    def find(self, model: str, shape: ModelShape) -> Demand | None:
        """Return what is known of a model, None if nothing."""
        return self._models.get((model, shape))

    def named(self, model: str) -> Demand | None:
        """Return what is known of the model of a name or fingerprint, of several the one that learned last.

        Args:
            model: The name or fingerprint; empty for any model.
        """
        for (fingerprint, _), known in reversed(self._models.items()):
            if model in ("", fingerprint, known.name):
                return known
        return None


def _profile(model: str, shape: ModelShape, surprises: Surprises) -> Profile | None:
    """Return losses relative to their mean at half of the length: that is all sharing needs. None if all are 0."""
    if not surprises.any():
        return None
    shares = np.array(_SHARES)
    table = np.zeros((shape.layers, shape.kv_heads, len(_SHARES)))
    curves = (surprises / surprises.mean())[:, None] * (1 - shares) / shares
    table[list(shape.global_layers)] = curves.reshape(-1, *table.shape[1:])
    return Profile.of(model, list(_SHARES), table.ravel().tolist(), shape.layers, shape.kv_heads)
