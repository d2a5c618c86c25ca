"""Whether loading a prefix is faster than reading it, as measured here."""

# Weight of the newest measurement in the means.
_NEWEST = 0.3
# What loading is taken to need after it was found too slow, as a share of before: so that it is tried again some time.
_RETRIED = 0.9


class Rates:
    """How fast prefixes load and prompts are read: moving means. Each number is written by one thread only.

    Args:
        advantage: How many times faster than reading loading must be; 0 always loads.
    """

    def __init__(self, advantage: float) -> None:
        self._advantage = advantage
        # Seconds a byte and seconds a token; 0 if nothing was measured.
        self._load = 0.0
        self._read = 0.0

    def loaded(self, size: int, seconds: float) -> None:
        """Note that ``size`` bytes came from the store."""
        self._load = _mean(self._load, seconds / max(1, size))

    def read(self, tokens: int, seconds: float) -> None:
        """Note that tokens of a prompt were read."""
        self._read = _mean(self._read, seconds / tokens)

    def reading(self, tokens: int) -> float:
        """Return how long reading tokens takes, in seconds; 0 if that is not known."""
        return tokens * self._read

    def worth(self, tokens: int, size: int) -> bool:
        """Whether loading ``size`` bytes is faster than reading ``tokens``; yes while either was never measured."""
        if not (self._load and self._read) or size * self._load * self._advantage <= self.reading(tokens):
            return True
        self._load *= _RETRIED
        return False


def _mean(before: float, newest: float) -> float:
    return before + _NEWEST * (newest - before) if before else newest
