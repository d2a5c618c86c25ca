"""From generated tokens to text, piece by piece, and where a stop string ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from scissorhands.detokenizer import Detokenizer
from scissorhands.errors import InvalidRequestError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Check the stop strings of a request.

    Raises:
        InvalidRequestError: There are too many, or one is empty or too long.
    """
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError("stop", f"must hold at most {MAX_STOPS} strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}"
            )
    return tuple(stops)


@dataclass(frozen=True)
class TextDelta:
    """What became certain with one token.

    Args:
        text: More of the answer; whole characters.
        stop: The stop string that ended the answer, if one did; push nothing after it.
    """

    text: str
    stop: str | None = None


class TextStream:
    """The text of one answer. All that it returns, joined, is the decoded answer up to the first stop string.

    Special tokens have no text. The stop string that is completed first ends the answer; of several that one
    character completes, the longest. Where tokens begin and end makes no difference.

    Args:
        tokenizer: The model's tokenizer.
        stops: Stop strings, checked.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = _StopFinder(stops)

    def push(self, token_id: int) -> TextDelta:
        """Take the next token. Text that may yet be part of a character or of a stop string is held back."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return what was held back, when the answer ends without a stop string."""
        last = self._stops.push(self._detokenizer.finish())
        return last.text if last.stop is not None else last.text + self._stops.finish()


class _StopFinder:
    """Lets text through up to the first stop string, holding back an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> TextDelta:
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return TextDelta(text[:at], stop)
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return TextDelta(text[:certain])

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
