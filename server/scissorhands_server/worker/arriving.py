"""What a row begins with, some of it still on its way from the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scissorhands.incoming import Incoming
from scissorhands.row import Row
from scissorhands_server.worker.arrival import Arrival

# The most that a forward pass waits for a layer; when nothing else can go on, how long one look for slots takes.
LAYER_SECONDS = 0.05


class Beginning(Protocol):
    """What a row begins with. The engine's thread calls one of the last two when it has it, or never will."""

    def incoming(self, row: Row, ids: Sequence[int]) -> tuple[Incoming, Arrival] | None:
        """Return what puts it in an empty row, and where its bytes come; None if there is nothing that fits."""

    def arrived(self) -> None:
        """Take note that the row has all of it, and free the bytes."""

    def lost(self, *, corrupt: bool) -> None:
        """Free the bytes of what will not be used; ``corrupt`` if they are not what they should be."""


@dataclass
class Arriving:
    """A row's slots on their way.

    Args:
        beginning: Whose they are.
        incoming: Puts them in place.
        arrival: Where their bytes come.
        late: Whether a forward pass has waited for them in vain.
    """

    beginning: Beginning
    incoming: Incoming
    arrival: Arrival
    late: bool = False

    @property
    def held(self) -> bool:
        """Whether the row should rather let others go first."""
        return not self.arrival.over

    def wait(self, layer: int) -> None:
        """Put a layer of the pool in place once it has come.

        Raises:
            LateError: It has not come in time.
            CorruptRowError: The bytes are of other tokens.
        """
        if not self.arrival.wait(self.incoming.needed(layer), LAYER_SECONDS):
            raise LateError
        self.incoming.put(layer)


class LateError(Exception):
    """A layer has not come in time."""
