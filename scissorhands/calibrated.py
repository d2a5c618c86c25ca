"""What ``scissorhands calibrate`` measured of a model, as its files tell."""

from pathlib import Path
from typing import NamedTuple

from scissorhands.codec.statistics import Statistics, find
from scissorhands.profile import Profile


class Calibrated(NamedTuple):
    """Both parts; each may be missing.

    Args:
        profile: What eviction and fewer bits cost in each KV head, which budgets are shared by.
        statistics: What was measured of keys and values, which some codecs are fitted to.
    """

    profile: Profile | None = None
    statistics: Statistics | None = None

    @classmethod
    def find(cls, model: str, profile: Path | None = None) -> "Calibrated":
        """Read what there is of a model.

        Args:
            model: Its folder; of anything else there is nothing.
            profile: A profile that is taken instead of the one in the folder, with the statistics beside it if there
                are any.

        Raises:
            InvalidRequestError: A file cannot be read or holds something else.
        """
        beside = find(profile.parent) if profile else None
        return cls(Profile.find(model, profile), beside or find(Path(model).expanduser()))
