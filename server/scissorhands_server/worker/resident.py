"""Which formats of resident slots this worker can hold."""

from collections.abc import Iterable

from scissorhands.budget import Grant
from scissorhands.codec import Statistics, codec_version, get_codec
from scissorhands.errors import ConfigurationError, InvalidRequestError
from scissorhands.formats import EXACT, resident
from scissorhands.grant import PLANNED
from scissorhands_server.worker.loading import LoadedModel

# Whatever stops a codec from being made stops that of one head.
_ONE_HEAD = slice(0, 1)
# What a plan may choose.
_PLANNED_FORMAT = "klt"


def check_resident(names: Iterable[str], head_dim: int, statistics: Statistics | None) -> None:
    """Make sure that slots can be resident in some formats.

    Args:
        names: The formats.
        head_dim: Elements of a key.
        statistics: What was measured of the model; None if nothing was.

    Raises:
        InvalidRequestError: One is unknown, cannot be resident, or needs statistics that there are not.
    """
    for name in sorted(set(names)):
        try:
            get_codec(resident(name).name, head_dim, statistics, _ONE_HEAD)
        except InvalidRequestError as error:
            raise InvalidRequestError("resident_codec", error.description) from error


def resident_version(granted: Grant, statistics: Statistics | None) -> str:
    """Return the versions of the formats in which a grant's slots are resident; empty if all are as they are."""
    versions = {codec_version(name, statistics) for name in granted.codecs if name != EXACT}
    return ",".join(sorted(versions))


def check_default(name: str, loaded: LoadedModel) -> None:
    """Make sure that the format of requests that name none can be held.

    Raises:
        ConfigurationError: It cannot.
    """
    try:
        planned = name == PLANNED
        check_resident([_PLANNED_FORMAT if planned else name], loaded.info.head_dim, loaded.statistics)
    except InvalidRequestError as error:
        raise ConfigurationError(str(error)) from error
    if planned and not (loaded.profile and loaded.profile.bits):
        raise ConfigurationError(
            f"resident_codec: {PLANNED} needs a profile that tells what fewer bits cost: run scissorhands calibrate"
        )
