"""Rows on the host: their whole state, on the way to the store or until they go on here."""

from collections.abc import Sequence
from dataclasses import dataclass

from scissorhands.row import Pending, Row
from scissorhands.row_state import save
from scissorhands.suspended import token_digest


@dataclass(frozen=True)
class KeptRow:
    """A row's state; see :class:`~scissorhands.suspended.Manifest`.

    Args:
        step: Tokens seen.
        epoch: Evictions applied.
        prompt: Position after the last token that was read as a prompt.
        lengths: n of each layer of its pool.
        tokens: Digest of the token ids seen.
        data: Its bytes.
    """

    step: int
    epoch: int
    prompt: int
    lengths: tuple[int, ...]
    tokens: str
    data: memoryview

    @classmethod
    def of(cls, row: Row, ids: Sequence[int]) -> "KeptRow":
        """Copy a row's state to the host.

        Args:
            row: The row, between two forward passes.
            ids: Token ids, at least those that it has seen.

        Raises:
            EngineError: The row is in the middle of a pass.
        """
        seen = ids[: row.step]
        data = save(row, seen)
        return cls(row.step, row.epoch, row.prompt, tuple(row.lengths), token_digest(seen), data)


@dataclass(frozen=True)
class ParkedRow:
    """A row that was put away in the middle of its turn.

    Args:
        kept: Its state.
        pending: Its snapshot in flight, and the plan that was asked for. It was on the host before, too.
        since: When it was put away, in seconds.
    """

    kept: KeptRow
    pending: Pending | None
    since: float
