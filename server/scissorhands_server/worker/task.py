"""A task: one request on its way through the engine."""

import asyncio
import hashlib
from array import array
from dataclasses import dataclass, field

from scissorhands.budget import Grant
from scissorhands.errors import EngineError, ScissorhandsError
from scissorhands.row import Row
from scissorhands_server.worker.arriving import Arriving, Beginning
from scissorhands_server.worker.kept_row import ParkedRow
from scissorhands_server.worker.outbox import Outbox
from scissorhands_server.worker.prefix import Prefix
from scissorhands_server.worker.quality import Quality
from scissorhands_server.worker.recalling import Recalling
from scissorhands_server.worker.sampling import Sampler, SamplingParameters
from scissorhands_server.worker.scheduler import Priority
from scissorhands_server.worker.text import TextStream
from scissorhands_server.worker.turn import Turn


@dataclass(frozen=True)
class GenerationRequest:
    """A request that has been checked.

    Args:
        prompt: Token ids.
        max_new_tokens: Most tokens to generate.
        sampling: How tokens are chosen.
        stop: Stop strings.
        ignore_eos: Whether to continue past end-of-sequence tokens.
        shadow: Whether to compare the answer with a full cache's; None leaves it to the worker.
        recall_share: Share of each head's budget that may be recalled at once; 0 recalls nothing.
        recall_every: Tokens of the answer from one recall to the next; 0 recalls at the prompt's end only.
        priority: How urgent it is.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParameters
    stop: tuple[str, ...]
    ignore_eos: bool
    shadow: bool | None = None
    recall_share: float = 0.0
    recall_every: int = 0
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True)
class Progress:
    """The prompt is being read: tokens done."""

    done: int


@dataclass(frozen=True)
class Token:
    """One token was generated; ``text`` is what became certain with it."""

    token_id: int
    text: str


@dataclass(frozen=True)
class Rest:
    """Generation ended; ``text`` is what was still held back."""

    text: str


@dataclass(frozen=True)
class Finished:
    """All that there is to tell is known; generation ended by ``eos``, ``stop`` or ``length``."""

    reason: str
    stop: str


@dataclass(frozen=True)
class Failed:
    """Generation ended with an error."""

    error: ScissorhandsError


Event = Progress | Token | Rest | Finished | Failed


@dataclass
class Statistics:
    """What a task's cache did; see the protocol's ``CacheStatistics``."""

    evictions: int = 0
    evicted_slots: int = 0
    mass_dropped: float = 0.0
    plans_manager: int = 0
    plans_local: int = 0
    prefill_stall: float = 0.0
    segments: int = 0
    segment_bytes: int = 0
    segments_dropped: int = 0


@dataclass(eq=False)
class Task:
    """One request: what was asked, how far it has come, and the events that its stream waits for.

    The engine's thread owns everything but ``events`` and ``cancelled``. Events are at most one for each prompt token
    and new token and two at the end, so the queue between the threads is bounded by the request itself. A task that has
    ``finished`` has given its row back; it only waits for its shadow.
    """

    session_id: str
    request: GenerationRequest
    grant: Grant
    codec: str
    sampler: Sampler
    text: TextStream
    outbox: Outbox
    arrived: float
    shadowed: bool = False
    turn: Turn | None = None
    prefix: Prefix | None = None
    recall: Recalling | None = None
    arriving: Arriving | None = None
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    row: Row | None = None
    parked: ParkedRow | None = None
    ids: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    quality: Quality = field(default_factory=Quality)
    finished: Finished | None = None
    started: float = 0.0
    held_since: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self._digest = hashlib.sha256()
        self._digested = 0

    @property
    def priority(self) -> Priority:
        """How urgent it is."""
        return self.request.priority

    @property
    def row_bytes(self) -> int:
        """Bytes of its row."""
        return self.grant.bytes

    @property
    def put_away(self) -> bool:
        """Whether its row was put away and waits to go on."""
        return self.parked is not None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been read."""
        return self.row is not None and self.row.step >= len(self.request.prompt)

    @property
    def unread(self) -> int:
        """Tokens of the prompt that its row has not seen."""
        return len(self.request.prompt) - self.seat.step

    def keep(self) -> None:
        """Keep the row, as far as it has come, for the next turn of its session; from the engine's thread."""
        if self.turn and self.row and self.row.step and not (self.cancelled or self.arriving):
            self.turn.save(self.row, self.ids)

    @property
    def held(self) -> bool:
        """Whether what it recalls, or what its row begins with, is on its way."""
        return (self.recall is not None and self.recall.waits) or (self.arriving is not None and self.arriving.held)

    @property
    def recalls_next(self) -> bool:
        """Whether it recalls before its next token is decoded."""
        return self.recall is not None and self.recall.every > 0 and self.generated % self.recall.every == 0

    @property
    def seat(self) -> Row:
        """The row of a task that runs.

        Raises:
            EngineError: It has none.
        """
        if self.row is None:
            raise EngineError("the task has no row")
        return self.row

    @property
    def beginnings(self) -> list[Beginning]:
        """What the task's row may begin with; one of them at most has something for it."""
        return [beginning for beginning in (self.turn, self.prefix) if beginning]

    def emit(self, event: Event) -> None:
        """Hand an event to the stream, from the engine's thread."""
        self.outbox.put(self.events, event)

    def token_digest(self, step: int) -> str:
        """Return the hex SHA-256 of the first ``step`` token ids; ``step`` never falls."""
        self._digest.update(array("I", self.ids[self._digested : step]).tobytes())
        self._digested = step
        return self._digest.hexdigest()
