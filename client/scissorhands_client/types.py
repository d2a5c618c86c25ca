"""What callers hand in and get back: requests and the events of a stream. No protobuf in sight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from scissorhands_client.budget import Budget
from scissorhands_client.quality import Quality


@dataclass(frozen=True)
class Policy:
    """An eviction policy.

    Args:
        name: Name of the policy, such as ``scissorhands`` or ``h2o``.
        preset: Preset of the policy; empty means its default.
        parameters: Numbers to override, by name: recent, sinks, drop, lookahead, chunk, window, tail.
    """

    name: str
    preset: str = ""
    parameters: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, parameters: Mapping[str, int] | None = None) -> "Policy":
        """Read ``name`` or ``name:preset``."""
        name, _, preset = text.strip().partition(":")
        return cls(name, preset, dict(parameters or {}))

    def __str__(self) -> str:
        return f"{self.name}:{self.preset}" if self.preset else self.name


class Priority(Enum):
    """How urgent a request is."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation.

    Args:
        role: ``system``, ``user`` or ``assistant``.
        content: What was said.
    """

    role: str
    content: str


@dataclass(frozen=True)
class TokenIds:
    """A prompt given as token ids, first token first."""

    ids: tuple[int, ...]


# Plain text, a conversation for the model's chat template, or token ids.
Prompt = str | Sequence[ChatMessage] | TokenIds


@dataclass(frozen=True)
class GenerateOptions:
    """Everything besides the prompt that decides an answer. The defaults leave each choice to the server.

    Args:
        max_new_tokens: Most tokens to generate.
        budget: The cache budget.
        policy: The eviction policy, also as ``name`` or ``name:preset``.
        temperature: Softmax temperature; 0 is greedy.
        top_p: Nucleus mass kept, above 0 and at most 1.
        top_k: Number of most likely tokens kept; 0 keeps all.
        repetition_penalty: Penalty on tokens already seen; 1 penalizes nothing.
        seed: Seed of the random numbers; None draws one.
        stop: Generation ends before the first of these that appears; one string is a list of one.
        ignore_eos: Continue past the model's end-of-sequence tokens.
        model: Name of the model; empty means the one that the worker serves.
        shadow: Whether to compare the answer with a full cache's; None leaves it to the worker.
        resident_codec: Format that resident slots are packed in, such as ``int4`` or ``turboquant:k4v3``; ``none``
            holds them as they are, ``planned`` lets the model's profile choose; empty leaves it to the server.
        session_id: Id of a conversation whose cache is kept between its turns, so that the next prompt, again the whole
            conversation, is read from where this one ended; letters, digits, ``_`` and ``-``, hard to guess. Empty
            keeps nothing.
        prefix_cache: Whether what the prompt begins with may be taken from the store, if an equal prompt was read
            before, and be stored for others.
        recall: Share of the budget that evicted slots may take back where the last tokens ask for them, above 0 and at
            most 1; None recalls nothing.
        recall_every: Recall again after so many tokens of the answer; 0 recalls at the end of the prompt only.
        priority: How urgent the request is: the more urgent come first, and may make a less urgent answer pause.
    """

    max_new_tokens: int | None = None
    budget: Budget | None = None
    policy: Policy | str | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int = 0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] | str = ()
    ignore_eos: bool = False
    model: str = ""
    shadow: bool | None = None
    resident_codec: str = ""
    session_id: str = ""
    prefix_cache: bool = True
    recall: float | None = None
    recall_every: int = 0
    priority: Priority = Priority.NORMAL


class GrantSource(Enum):
    """Who resolved a budget."""

    UNSPECIFIED = "unspecified"
    MANAGER = "manager"
    LOCAL = "local"


class BudgetSource(Enum):
    """By what the KV heads of a layer share a budget."""

    UNSPECIFIED = "unspecified"
    EQUAL = "equal"
    PROFILE = "profile"
    MEASURED = "measured"


@dataclass(frozen=True)
class Grant:
    """A resolved budget. The numbers are in slots per layer and KV head unless said otherwise.

    Args:
        policy: Name of the policy.
        preset: Preset of the policy.
        layer_slots: B of each layer; with ``by_head`` of each KV head, layer by layer.
        drop: m, slots dropped at once.
        lookahead: L, slots between a snapshot and the eviction that it decides.
        chunk: c, tokens of one prefill chunk.
        recent: r, newest slots that are exempt.
        sinks: s, first slots that are exempt.
        window: w, queries that importance looks back on; 0 means all.
        bytes: Bytes that the sequence's cache allocates, evidence included.
        raised: True when a fraction was raised to the smallest valid budget.
        source: Who resolved it.
        codec: Codec in which evicted slots are stored; empty means that they are not.
        lease_seconds: How long the session lives without being renewed.
        tail: t, last tokens of the prompt that are exempt.
        by_head: Whether the KV heads of a layer have budgets of their own.
        budget_source: By what the KV heads share the budget.
        resident_codecs: Format that the slots of each entry of ``layer_slots`` are packed in, ``none`` if they are as
            they are; nothing if all are.
    """

    policy: str
    preset: str
    layer_slots: tuple[int, ...]
    drop: int
    lookahead: int
    chunk: int
    recent: int
    sinks: int
    window: int
    bytes: int
    raised: bool
    source: GrantSource
    codec: str
    lease_seconds: float
    tail: int = 0
    by_head: bool = False
    budget_source: BudgetSource = BudgetSource.UNSPECIFIED
    resident_codecs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accepted:
    """First event: the request is valid and has its grant.

    Args:
        session_id: Id of the session with the cache manager.
        prompt_tokens: Tokens of the prompt.
        grant: The budget and the policy's numbers.
        max_new_tokens: Most tokens that will be generated.
        queued_ahead: Requests that are ahead in the queue.
        seed: Seed in use; None when decoding is greedy.
        resumed_tokens: Tokens of the prompt that need not be read, because an earlier turn's cache was kept.
    """

    session_id: str
    prompt_tokens: int
    grant: Grant
    max_new_tokens: int
    queued_ahead: int
    seed: int | None
    resumed_tokens: int = 0


@dataclass(frozen=True)
class PrefillProgress:
    """How much of the prompt has been read, in tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """The part of the answer that became certain since the last one.

    Args:
        text: Text; whole characters only.
        token_ids: Tokens generated since the last delta; their text may still be held back.
    """

    text: str
    token_ids: tuple[int, ...]


class FinishReason(Enum):
    """Why generation ended."""

    UNSPECIFIED = "unspecified"
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Usage:
    """Tokens and times of one answer.

    Args:
        prompt_tokens: Tokens of the prompt.
        generated_tokens: Tokens generated, the end-of-sequence token included.
        queue_seconds: From arrival to the start of prefill.
        time_to_first_token_seconds: From arrival to the first token.
        decode_seconds: From the first token to the last.
        prefix_tokens: Tokens of the prompt that were not read, because an equal prefix was stored.
    """

    prompt_tokens: int
    generated_tokens: int
    queue_seconds: float
    time_to_first_token_seconds: float
    decode_seconds: float
    prefix_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed after the first token; None if there was no second one."""
        if self.generated_tokens < 2 or self.decode_seconds <= 0:  # noqa: PLR2004 - a rate needs two tokens.
            return None
        return (self.generated_tokens - 1) / self.decode_seconds


@dataclass(frozen=True)
class CacheStatistics:
    """What one sequence's cache held and dropped.

    Args:
        full_bytes: Bytes of a cache of all its tokens, in the model's own number type.
        allocated_bytes: Bytes that were allocated for it, evidence included.
        full_16bit_bytes: Bytes of a cache of all its tokens with 16-bit numbers.
        evictions: Evictions applied.
        evicted_slots: Slots evicted, over all layers and KV heads.
        mass_dropped: Share of all attention that lay on evicted slots up to their eviction, between 0 and 1.
        plans_manager: Plans that came from the manager.
        plans_local: Plans that the worker computed itself.
        prefill_stall_seconds: Time that prefill waited for plans.
        segments: Segments handed to the store's queue.
        segment_bytes: Encoded bytes of those segments.
        segments_dropped: Segments dropped because the queue was full or the manager was away.
        suspended_bytes: Bytes kept in the store for the next turn; 0 if nothing was kept.
        recalled_slots: Slots that were recalled, over all layers and KV heads.
        recalled_sections: Sections that they were chosen from.
        recall_misses: What could not be recalled: how often, by reason. Without any, equal requests get equal answers.
    """

    full_bytes: int
    allocated_bytes: int
    full_16bit_bytes: int
    evictions: int
    evicted_slots: int
    mass_dropped: float
    plans_manager: int
    plans_local: int
    prefill_stall_seconds: float
    segments: int
    segment_bytes: int
    segments_dropped: int
    suspended_bytes: int = 0
    recalled_slots: int = 0
    recalled_sections: int = 0
    recall_misses: dict[str, int] = field(default_factory=dict)

    @property
    def compression(self) -> float | None:
        """How many times smaller than a full cache of the model's own number type, every byte counted."""
        return self.full_bytes / self.allocated_bytes if self.allocated_bytes else None

    @property
    def compression_16bit(self) -> float | None:
        """How many times smaller than a full 16-bit cache, every byte counted."""
        return self.full_16bit_bytes / self.allocated_bytes if self.allocated_bytes else None


@dataclass(frozen=True)
class Finish:
    """Last event.

    Args:
        reason: Why generation ended.
        stop: The stop string that appeared; empty if none did.
        usage: Tokens and times.
        cache: What the cache did.
        quality: What eviction cost.
    """

    reason: FinishReason
    stop: str
    usage: Usage
    cache: CacheStatistics
    quality: Quality


Event = Accepted | PrefillProgress | Delta | Finish


@dataclass(frozen=True)
class Result:
    """A whole answer.

    Args:
        text: The text.
        token_ids: Every generated token.
        accepted: What was granted.
        finish: Why it ended and what was used.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: Accepted
    finish: Finish
