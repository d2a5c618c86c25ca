"""What eviction cost one sequence, as its worker tells it."""

from dataclasses import dataclass
from enum import Enum

from scissorhands.v1 import quality_pb2


class ShadowResult(Enum):
    """What became of a comparison with a full cache."""

    NOT_ASKED = "not_asked"
    MEASURED = "measured"
    NO_MEMORY = "no_memory"
    LATE = "late"
    FAILED = "failed"


_SHADOW_RESULTS = {
    quality_pb2.SHADOW_RESULT_MEASURED: ShadowResult.MEASURED,
    quality_pb2.SHADOW_RESULT_NO_MEMORY: ShadowResult.NO_MEMORY,
    quality_pb2.SHADOW_RESULT_LATE: ShadowResult.LATE,
    quality_pb2.SHADOW_RESULT_FAILED: ShadowResult.FAILED,
}


@dataclass(frozen=True)
class Divergence:
    """How an answer's next-token distributions differ from those that a full cache gives after the same tokens.

    Args:
        tokens: Generated tokens that were compared.
        nats: Mean Kullback-Leibler divergence from the full cache, per token; 0 when nothing was evicted.
        same_share: Share of the tokens at which both have the same most likely token, between 0 and 1.
    """

    tokens: int
    nats: float
    same_share: float


@dataclass(frozen=True)
class Quality:
    """What eviction cost.

    Args:
        recent_mass_dropped: Of the attention since the eviction before, the share on the slots that an eviction
            dropped, between 0 and 1; mean over the evictions. None when nothing was evicted.
        recent_mass_dropped_peak: The largest of these shares.
        persistence: Overlap of the half of the slots that mattered with the half that mattered next, between 0 and 1;
            chance gives one half. None before it could be measured.
        shadow: What became of the comparison with a full cache.
        divergence: The comparison; None if none was made.
    """

    recent_mass_dropped: float | None
    recent_mass_dropped_peak: float | None
    persistence: float | None
    shadow: ShadowResult
    divergence: Divergence | None


def read_quality(message: quality_pb2.Quality) -> Quality:
    """Read what a worker tells."""
    compared = message.divergence
    return Quality(
        recent_mass_dropped=message.recent_mass_dropped if message.HasField("recent_mass_dropped") else None,
        recent_mass_dropped_peak=(
            message.recent_mass_dropped_peak if message.HasField("recent_mass_dropped_peak") else None
        ),
        persistence=message.persistence if message.HasField("persistence") else None,
        shadow=_SHADOW_RESULTS.get(message.shadow, ShadowResult.NOT_ASKED),
        divergence=(
            Divergence(compared.tokens, compared.nats, compared.same_share) if message.HasField("divergence") else None
        ),
    )
