"""The base of all eviction policies: a policy scores slots, the base selects."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scissorhands.budget import EvictionParameters, slots_to_drop
from scissorhands.snapshot import Keep, LayerEvidence, Plan, Snapshot, joined

Scores = npt.NDArray[np.floating]

# The first tokens draw attention whatever they are (arXiv 2309.17453); small budgets collapse without them.
SINKS = 4


class Policy(ABC):
    """Decides which slots of a row are kept.

    An author gives a name, the numbers for a budget and :meth:`score`. A head is decided from its own evidence alone,
    so a plan can be computed layer by layer, or of all layers at once.
    """

    name: ClassVar[str]
    presets: ClassVar[tuple[str, ...]] = ("default",)

    @property
    def shares_by_loss(self) -> bool:
        """Whether KV heads share the budget by what eviction costs them, if that was measured; else all get as much."""
        return False

    @property
    def reads_vectors(self) -> bool:
        """Whether a signal reads the keys or values of all slots, which a packed cache has not at hand."""
        return False

    def __init__(self, preset: str = "default") -> None:
        self.preset = preset

    @abstractmethod
    def parameters(self, slots: int) -> EvictionParameters:
        """Return the policy's numbers for a budget of ``slots``."""

    @abstractmethod
    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return ``[kv_heads, n]`` scores; slots with the lowest are dropped first.

        Args:
            evidence: The layer's evidence.
            step: Tokens that the row had seen when it was taken.
            parameters: The numbers in force.
        """

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the signals that :meth:`score` needs besides mass, with the bytes that each takes per slot."""
        del parameters
        return {}

    def evidence_bytes(self, parameters: EvictionParameters, group: int) -> int:
        """Return the bytes that all of :meth:`signals` take per slot, with ``group`` query heads to a KV head."""
        del group
        return sum(self.signals(parameters).values())

    def check(self, parameters: EvictionParameters) -> None:
        """Refuse numbers that the policy or its signals cannot work with.

        Raises:
            InvalidRequestError: A number is out of range.
        """
        del parameters

    def plan(self, parameters: EvictionParameters, layer_slots: tuple[int, ...], snapshot: Snapshot) -> Plan:
        """Return which slots of ``snapshot`` to keep; a pure function of its arguments."""
        lengths = [layer.length for layer in snapshot.layers]
        drops = slots_to_drop(lengths, layer_slots, parameters, snapshot.incoming, snapshot.ahead)
        alike: dict[tuple[int, int, int], list[int]] = {}
        for index, key in enumerate(zip(lengths, drops, layer_slots, strict=True)):
            alike.setdefault(key, []).append(index)
        keep: dict[int, Keep] = {}
        for (_, drop, slots), indices in alike.items():
            numbers = parameters.within(slots)
            layers = [snapshot.layers[index] for index in indices]
            # A head is decided from its own evidence alone, so all heads of like layers are decided at once.
            kept = self.keep(joined(layers), drop, numbers, snapshot)
            ends = np.cumsum([len(layer.positions) for layer in layers])
            keep.update(zip(indices, np.split(kept, ends[:-1]), strict=True))
        return Plan(epoch=snapshot.epoch, step=snapshot.step, keep=tuple(keep[index] for index in range(len(lengths))))

    def keep(self, evidence: LayerEvidence, drop: int, parameters: EvictionParameters, snapshot: Snapshot) -> Keep:
        """Return ``[kv_heads, n]``, which slots of one layer to keep.

        Args:
            evidence: The layer's evidence.
            drop: Slots to drop of each head.
            parameters: The layer's numbers.
            snapshot: When the evidence was taken; its layers do not matter.
        """
        if drop == 0:
            return np.ones(evidence.positions.shape, dtype=np.bool_)
        return ~lowest(self.ranks(evidence, parameters, snapshot), drop)

    def ranks(self, evidence: LayerEvidence, parameters: EvictionParameters, snapshot: Snapshot) -> Scores:
        """Return ``[kv_heads, n]`` scores by which slots are dropped, the lowest first; those that are exempt infinite.

        The arguments are those of :meth:`keep`.
        """
        scores = self.score(evidence, snapshot.step, parameters)
        # A model that computes nonsense still keeps to its budget.
        scores = np.where(np.isnan(scores), np.inf, scores)
        # Positions ascend, so the sinks come first.
        first = slice(parameters.sinks)
        scores[:, first][evidence.positions[:, first] < parameters.sinks] = np.inf
        if parameters.tail:
            tail = snapshot.prompt - parameters.tail
            scores[(evidence.positions >= tail) & (evidence.positions < snapshot.prompt)] = np.inf
        # The newest slots at the time of the eviction are exempt; `ahead` of them are not in the snapshot yet.
        exempt = max(0, parameters.recent - snapshot.ahead)
        if exempt:
            scores[:, -exempt:] = np.inf
        return scores


def lowest(scores: Scores, count: int) -> npt.NDArray[np.bool_]:
    """Return ``[kv_heads, n]``, which are the ``count`` lowest ``scores`` of each head: of equal ones the older.

    Args:
        scores: ``[kv_heads, n]``, slots in the order of their positions; no NaN.
        count: At least 1, at most n.
    """
    # Selecting takes a fraction of the time of a stable sort, and finds the same slots.
    threshold = np.partition(scores, count - 1, axis=1)[:, count - 1 : count]
    chosen: npt.NDArray[np.bool_] = scores <= threshold
    if np.count_nonzero(chosen) > count * len(scores):
        level = scores == threshold
        below = chosen & ~level
        needed = count - below.sum(axis=1, keepdims=True)
        chosen = below | (level & (np.cumsum(level, axis=1) <= needed))
    return chosen


def common_parameters(slots: int, *, recent: int, window: int = 0) -> EvictionParameters:
    """Return the numbers that most policies share, scaled down for small budgets.

    Evicting 16 slots at a time costs no measurable quality and spreads the work; a chunk of a quarter of the budget
    leaves three quarters of it to remember with while a prompt is read.
    """
    drop = min(16, max(1, slots // 8))
    return EvictionParameters(
        recent=recent,
        sinks=SINKS,
        drop=drop,
        lookahead=min(8, drop),
        chunk=max(1, min(256, slots // 4, slots - SINKS - recent)),
        window=window,
    )
