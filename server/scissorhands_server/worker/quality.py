"""Online quality: what eviction costs one task, estimated from the snapshots that decide its evictions."""

from dataclasses import dataclass, field
from enum import Enum

from scissorhands.importance import Attention, attention, persistence, recent_mass_dropped
from scissorhands.row import Eviction
from scissorhands.v1 import quality_pb2

# Persistence sorts all slots, so it is measured at most once in as many queries as this share of the slots in use.
PERSISTENCE_SHARE = 0.25


class ShadowResult(Enum):
    """What became of a task's comparison with a full cache."""

    MEASURED = "measured"
    NO_MEMORY = "no_memory"
    LATE = "late"
    FAILED = "failed"
    CANCELLED = "cancelled"


_SHADOW_RESULTS = {
    ShadowResult.MEASURED: quality_pb2.SHADOW_RESULT_MEASURED,
    ShadowResult.NO_MEMORY: quality_pb2.SHADOW_RESULT_NO_MEMORY,
    ShadowResult.LATE: quality_pb2.SHADOW_RESULT_LATE,
    ShadowResult.FAILED: quality_pb2.SHADOW_RESULT_FAILED,
}


@dataclass(frozen=True)
class Comparison:
    """A task's next-token distributions against those of a full cache.

    Args:
        tokens: Generated tokens that were compared.
        nats: Sum of their divergences.
        same: How many of them have the same most likely token.
    """

    tokens: int
    nats: float
    same: int


@dataclass
class Mean:
    """A mean and what it is of."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take a value in."""
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """The mean; None before there is a value."""
        return self.total / self.count if self.count else None


@dataclass
class Quality:
    """What eviction has cost a task so far; see the protocol's ``Quality``.

    Args:
        recent_mass_dropped: Of :func:`~scissorhands.importance.recent_mass_dropped`, over the evictions.
        peak: The largest of them.
        persistence: Of :func:`~scissorhands.importance.persistence`, averaged over the layers, over sampled pairs.
        shadow: What became of the comparison with a full cache; None while it is under way, or if none was asked for.
        comparison: Its figures, if it was made.
    """

    recent_mass_dropped: Mean = field(default_factory=Mean)
    peak: float = 0.0
    persistence: Mean = field(default_factory=Mean)
    shadow: ShadowResult | None = None
    comparison: Comparison | None = None
    _before: Attention | None = None
    _measured_at: int = 0

    def evicted(self, eviction: Eviction) -> tuple[float, float | None]:
        """Take an eviction in.

        Returns:
            What it dropped of the recent attention, and the persistence since the eviction before; None if that was not
            measured this time.
        """
        snapshot, before = eviction.snapshot, self._before
        dropped = recent_mass_dropped(snapshot, eviction.plan, before)
        self.recent_mass_dropped.add(dropped)
        self.peak = max(self.peak, dropped)
        self._before = after = attention(snapshot)
        slots = max(layer.length for layer in snapshot.layers)
        if before is None or snapshot.step - self._measured_at < PERSISTENCE_SHARE * slots:
            return dropped, None
        self._measured_at = snapshot.step
        layers = persistence(before, after)
        if not layers:
            return dropped, None
        persisted = sum(layers) / len(layers)
        self.persistence.add(persisted)
        return dropped, persisted

    def message(self) -> quality_pb2.Quality:
        """Write what is known."""
        message = quality_pb2.Quality(
            recent_mass_dropped=self.recent_mass_dropped.value,
            recent_mass_dropped_peak=self.peak if self.recent_mass_dropped.count else None,
            persistence=self.persistence.value,
        )
        if self.shadow in _SHADOW_RESULTS:
            message.shadow = _SHADOW_RESULTS[self.shadow]
        if self.comparison is not None:
            tokens = self.comparison.tokens
            message.divergence.tokens = tokens
            message.divergence.nats = self.comparison.nats / tokens
            message.divergence.same_share = self.comparison.same / tokens
        return message
