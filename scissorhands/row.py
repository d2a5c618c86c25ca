"""Rows: the bookkeeping of one sequence in the cache, in plain Python."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from scissorhands.budget import Grant
from scissorhands.pool import Pool
from scissorhands.slots import Slots
from scissorhands.snapshot import Plan, Snapshot


class PlanSource(Enum):
    """Who computed a plan."""

    MANAGER = "manager"
    LOCAL = "local"


class Phase(Enum):
    """What a row was doing when it had to evict."""

    PREFILL = "prefill"
    DECODE = "decode"


class PendingPlan(Protocol):
    """A plan that was asked for."""

    def take(self, timeout: float) -> Plan | None:
        """Return the plan if it has come, or comes within ``timeout`` seconds; None otherwise. Never raises."""


class Planner(Protocol):
    """Who is asked for plans. Whatever comes of it, the cache computes the same plan itself if none has come."""

    def submit(self, row: "Row", snapshot: Snapshot) -> PendingPlan | None:
        """Ask for the plan of a snapshot, without waiting; None if nobody can be asked now."""


@dataclass(frozen=True)
class Pending:
    """A snapshot in flight, and the plan that was asked for; None if nobody was asked."""

    snapshot: Snapshot
    plan: PendingPlan | None


@dataclass
class Row:
    """One sequence's place in the cache.

    Args:
        grant: Its budget and the policy's numbers.
        pool: The pool that holds its slots.
        index: Its place in the pool.
        name: Name by which a planner knows it.
        limit: Most tokens that will ever be appended; None if unknown.
        lengths: n of each layer of the pool: slots in use, per KV head.
        step: Tokens seen.
        epoch: Evictions applied.
        prompt: Position after the last token that was read as a prompt; 0 if none was.
        pending: The snapshot in flight; at most one.
        observed_layers: Layers of the pool whose evidence already holds the forward pass under way; 0 between passes. A
            pass that failed halfway is repeated without counting its queries twice.
    """

    grant: Grant
    pool: Pool
    index: int
    name: str = ""
    limit: int | None = None
    lengths: list[int] = field(default_factory=list)
    step: int = 0
    epoch: int = 0
    prompt: int = 0
    pending: Pending | None = None
    observed_layers: int = 0

    def __post_init__(self) -> None:
        self.lengths = [0] * len(self.grant.layer_slots)

    @property
    def slack(self) -> int:
        """Tokens that still fit before a layer must evict; without end if all layers slide."""
        slots, lengths = self.grant.layer_slots, self.lengths
        return min((slots[layer] - lengths[layer] for layer in self.pool.global_layers), default=sys.maxsize)

    @property
    def will_evict(self) -> bool:
        """Whether the row will outgrow its budget, as far as is known."""
        return self.limit is None or self.step + self.slack < self.limit

    def next_chunk(self, remaining: int) -> int:
        """Return how many of ``remaining`` prompt tokens come next; the grid is fixed by position and budget alone."""
        chunk = self.grant.parameters.chunk
        return min(chunk - self.step % chunk, remaining)

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has appended; in a sliding one the newest replace the oldest."""
        slots = self.grant.layer_slots
        self.lengths = [min(length + tokens, most) for length, most in zip(self.lengths, slots, strict=True)]
        self.step += tokens
        self.observed_layers = 0


@dataclass(frozen=True)
class Eviction:
    """What one plan evicted from a row.

    Args:
        row: The row.
        phase: What it was doing.
        source: Who computed the plan.
        snapshot: The snapshot that decided it.
        plan: The plan.
        epoch: Epoch that the eviction began.
        step: Tokens seen at the eviction.
        layers: The evicted slots of each layer of the row's pool.
        waited: Time spent waiting for the plan, in seconds.
    """

    row: Row
    phase: Phase
    source: PlanSource
    snapshot: Snapshot
    plan: Plan
    epoch: int
    step: int
    layers: tuple[Slots, ...]
    waited: float

    @property
    def slots(self) -> int:
        """Evicted slots over all layers and heads."""
        return sum(layer.positions.numel() for layer in self.layers)

    def exact_keys(self) -> list[torch.Tensor]:
        """Return the evicted keys of each layer as the model knows them, ``[kv_heads, d, head_dim]``."""
        pools = self.row.pool.layers
        return [pool.exact_keys(taken.keys) for pool, taken in zip(pools, self.layers, strict=True)]

    def mass(self) -> float:
        """Return the attention mass on the evicted slots, summed over layers and heads, in queries."""
        return sum(float(layer.mass.sum()) for layer in self.layers)
