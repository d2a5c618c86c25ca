"""What servers tell about themselves: the model that a worker serves and the sessions of a manager."""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from scissorhands_client.budget import Budget
from scissorhands_client.quality import Quality
from scissorhands_client.stored import StoredObject
from scissorhands_client.types import Grant, Policy


@dataclass(frozen=True)
class ModelInfo:
    """A model and the sizes that decide how large its cache is.

    Args:
        name: Name under which the worker serves it.
        fingerprint: Hex SHA-256 over the configuration and the weights.
        tokenizer_fingerprint: Hex SHA-256 over the tokenizer.
        architecture: Class name of the architecture.
        dtype: Number type of keys and values.
        layers: Attention layers.
        query_heads: Query heads per layer.
        kv_heads: Key-value heads per layer.
        head_dim: Elements of one key or value.
        max_positions: Most tokens of prompt and answer together.
        vocabulary: Vocabulary size, in token ids.
        element_bytes: Bytes of one element of a key or value.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    architecture: str
    dtype: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    vocabulary: int
    element_bytes: int


@dataclass(frozen=True)
class ServedModel:
    """A worker's model and limits.

    Args:
        model: The model.
        max_rows: Most requests that decode at once.
        max_queued: Most requests that wait.
        default_max_new_tokens: Most new tokens of a request that names no number.
        policies: Policies that the worker knows, each as ``name`` or ``name:preset``.
        chat: True when the tokenizer has a chat template.
        version: Version of the worker.
        manager_connected: True while the manager answers.
        cache_bytes: Most bytes of the rows of requests that decode; 0 if only their number is bounded.
        more_rows: More rows, of the size that was last asked for, that could be held now.
    """

    model: ModelInfo
    max_rows: int
    max_queued: int
    default_max_new_tokens: int
    policies: tuple[str, ...]
    chat: bool
    version: str
    manager_connected: bool
    cache_bytes: int = 0
    more_rows: int = 0


class SessionState(Enum):
    """Where a session is in its life."""

    UNSPECIFIED = "unspecified"
    OPEN = "open"
    CLOSED = "closed"
    EXPIRED = "expired"
    STORED = "stored"


@dataclass(frozen=True)
class SegmentInfo:
    """A stored segment.

    Args:
        epoch: Its id within the session.
        step: Step of the eviction, in tokens seen.
        slots: Slots in it, over all layers and KV heads.
        size_bytes: Encoded bytes.
    """

    epoch: int
    step: int
    slots: int
    size_bytes: int


@dataclass(frozen=True)
class SuspendedRow:
    """A row that waits in the store for the next turn of its session.

    Args:
        step: Tokens that it has seen.
        size_bytes: Its bytes.
        paused: Whether turns are kept from beginning, by ``pause_session``.
    """

    step: int
    size_bytes: int
    paused: bool = False


@dataclass(frozen=True)
class Session:
    """The manager's record of one session.

    Args:
        session_id: Its id.
        worker_id: Id of the worker that runs it.
        model: The model.
        prompt_tokens: Tokens of the prompt.
        max_new_tokens: Most tokens that will be generated.
        budget: The budget asked for; None if the manager's default was taken.
        policy: The policy asked for; None if the manager's default was taken.
        grant: The grant in force; None if none is recorded.
        state: Where it is in its life.
        open_time: When it was opened, in UTC; None if the manager knows of it from the store only.
        lease_end_time: When its lease ends, in UTC; None likewise.
        evictions: Evictions that the ledger has seen.
        evicted_slots: Slots evicted so far, over all layers and KV heads.
        resident_slots: Slots resident after the last eviction, over all layers and KV heads.
        step: Tokens that the row had seen at the last snapshot.
        mass_dropped: Share of attention mass that lay on evicted slots, between 0 and 1.
        persistence: Overlap of the most attended half of the slots between snapshots, per global layer; 0 to 1.
        segments: Segments in the store, oldest first; a list of sessions leaves it empty.
        segment_count: Number of segments in the store.
        segment_bytes: Bytes of the segments in the store.
        quality: What eviction cost, as the worker reported it when the session ended; None before.
        suspended: Its row in the store; None if there is none, and in a list of sessions.
        stored: What the store has of it: its row, its archive.
    """

    session_id: str
    worker_id: str
    model: ModelInfo
    prompt_tokens: int
    max_new_tokens: int
    budget: Budget | None
    policy: Policy | None
    grant: Grant | None
    state: SessionState
    open_time: datetime | None
    lease_end_time: datetime | None
    evictions: int
    evicted_slots: int
    resident_slots: int
    step: int
    mass_dropped: float
    persistence: tuple[float, ...]
    segments: tuple[SegmentInfo, ...]
    segment_count: int
    segment_bytes: int
    quality: Quality | None
    suspended: SuspendedRow | None = None
    stored: tuple[StoredObject, ...] = ()


@dataclass(frozen=True)
class MeasuredProfile:
    """What the KV heads of a model need, as the manager has measured it over the sessions of the model.

    Args:
        model: Fingerprint of the model.
        model_name: Name under which it was served.
        layers: Attention layers.
        kv_heads: KV heads of each layer.
        pairs: Pairs of successive snapshots that were compared.
        shares: Budgets as shares of the sequence's length, rising.
        losses: What eviction costs each head, relative to the others: layer by layer, head by head, share by share.
    """

    model: str
    model_name: str
    layers: int
    kv_heads: int
    pairs: int
    shares: tuple[float, ...]
    losses: tuple[float, ...]
