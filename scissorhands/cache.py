"""The resident cache: rows at a fixed budget, and when they evict.

A row's snapshot is taken when ``L`` more tokens fit, and its plan takes effect exactly when the row is full, never
earlier, even if it came early. If no plan has come by then, the cache computes the same plan from the same snapshot.
So who planned, and how fast, cannot change what is kept.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from scissorhands.budget import Grant, ModelShape, slots_to_drop
from scissorhands.codec import Statistics
from scissorhands.compaction import evict
from scissorhands.evidence import evidence_of
from scissorhands.plan import plan
from scissorhands.pool import Pool
from scissorhands.row import Eviction, Pending, PendingPlan, Phase, Planner, PlanSource, Row
from scissorhands.slots import Slots
from scissorhands.snapshot import Keep, Plan, Snapshot

PoolKey = tuple[tuple[int, ...], bool, tuple[str, ...], str, str, int]


class ResidentCache:
    """Rows of one model, each at its own budget. Not safe for use by several threads.

    Args:
        shape: The model's sizes.
        dtype: Number type of keys and values.
        device: Where the tensors live.
        planner: Who is asked for plans; None computes all on the spot.
        statistics: What was measured of the model, for codecs that need it.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        planner: Planner | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.rows: list[Row] = []
        self._planner = planner
        self._statistics = statistics
        self._pools: dict[PoolKey, Pool] = {}

    def add_row(self, grant: Grant, name: str = "", limit: int | None = None) -> Row:
        """Allocate a row of exactly the granted slots.

        Args:
            grant: Its budget and the policy's numbers.
            name: What the planner knows it by.
            limit: Most tokens that will ever be appended; None if unknown.
        """
        key = _pool_key(grant)
        pool = self._pools.get(key) or Pool(grant, self.shape, self.dtype, self.device, self._statistics)
        row = Row(grant=grant, pool=pool, index=pool.add_row(), name=name, limit=limit)
        self._pools[key] = pool
        self.rows.append(row)
        return row

    def remove_row(self, row: Row) -> None:
        """Free a row's memory."""
        self.rows.remove(row)
        pool = row.pool
        pool.remove_row(row.index)
        for other in self.rows:
            if other.pool is pool and other.index == pool.rows:
                other.index = row.index
        if pool.rows == 0:
            del self._pools[_pool_key(row.grant)]

    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors, measured on their storages."""
        return sum(pool.allocated_bytes() for pool in self._pools.values())

    def packed_bytes(self) -> int:
        """Return the bytes of packed keys and values, measured on their storages."""
        return sum(pool.packed_bytes() for pool in self._pools.values())

    def prepare_prefill(self, row: Row, incoming: int, deadline: float = 0.0) -> Eviction | None:
        """Make room for a chunk of a prompt.

        Args:
            row: The row.
            incoming: Tokens of the chunk.
            deadline: How long to wait for a plan before computing it here, in seconds.

        Returns:
            What was evicted, or None if the chunk fits.
        """
        row.pending = None  # A snapshot that decoding took counted on single tokens.
        snapshot = None if row.slack >= incoming else self.snapshot(row, ahead=0, incoming=incoming)
        row.prompt = row.step + incoming
        if snapshot is None:
            return None
        pending = Pending(snapshot, self._submit(row, snapshot))
        return self._evict(row, pending, Phase.PREFILL, deadline)

    def prepare_decode(self, row: Row) -> Eviction | None:
        """Make room for one decoded token; never waits.

        Returns:
            What was evicted, or None if the token fits.
        """
        eviction = None
        if row.slack < 1:
            pending = row.pending or Pending(self.snapshot(row, ahead=0, incoming=1), None)
            eviction = self._evict(row, pending, Phase.DECODE, 0.0)
        if row.pending is None and 0 < row.slack <= row.grant.parameters.lookahead and row.will_evict:
            snapshot = self.snapshot(row, ahead=row.slack, incoming=1)
            row.pending = Pending(snapshot, self._submit(row, snapshot))
        return eviction

    def snapshot(self, row: Row, ahead: int, incoming: int, layers: Sequence[int] | None = None) -> Snapshot:
        """Copy a row's evidence to the host; a sliding layer has none, whatever it holds.

        Args:
            row: The row.
            ahead: Tokens that will be appended before the eviction.
            incoming: Tokens that will be appended right after it.
            layers: The layers of its pool to look at; None means all.
        """
        chosen = range(len(row.pool.layers)) if layers is None else layers
        pools, lengths = [row.pool.layers[layer] for layer in chosen], [row.lengths[layer] for layer in chosen]
        evidence = evidence_of(pools, row.index, lengths, row.step)
        return Snapshot(row.epoch, row.step, ahead, incoming, evidence, row.prompt)

    def drop(self, row: Row, keep: Sequence[Keep], layers: Sequence[int] | None = None) -> tuple[Slots, ...]:
        """Evict from layers of a row, in place.

        Args:
            row: The row.
            keep: Of each layer ``[kv_heads, n]`` over the slots of the snapshot, equally many True in each head; newer
                slots stay. Of a sliding layer a snapshot has no slots, so nothing is evicted from it.
            layers: The layers of its pool; None means all.

        Returns:
            The evicted slots of each of them.
        """
        chosen = range(len(row.pool.layers)) if layers is None else layers
        pools = [row.pool.layers[layer] for layer in chosen]
        evicted = evict(pools, row.index, [row.lengths[layer] for layer in chosen], keep)
        for layer, pool, taken in zip(chosen, pools, evicted, strict=True):
            if dropped := taken.positions.shape[1]:
                row.lengths[layer] -= dropped
                pool.fold(row.index, row.lengths[layer], taken)
        return tuple(evicted)

    def _submit(self, row: Row, snapshot: Snapshot) -> PendingPlan | None:
        return self._planner.submit(row, snapshot) if self._planner else None

    def _evict(self, row: Row, pending: Pending, phase: Phase, deadline: float) -> Eviction:
        snapshot = pending.snapshot
        began = time.monotonic()
        decided = pending.plan.take(deadline) if pending.plan else None
        waited = time.monotonic() - began
        source = PlanSource.MANAGER
        if decided is None or not _fits(decided, row, snapshot):
            decided = plan(row.grant, snapshot)
            source = PlanSource.LOCAL
        step = row.step
        taken = self.drop(row, decided.keep)
        row.pending = None
        row.epoch += 1
        return Eviction(row, phase, source, snapshot, decided, row.epoch - 1, step, taken, waited)


def _fits(decided: Plan, row: Row, snapshot: Snapshot) -> bool:
    """Whether a plan from elsewhere answers this snapshot and drops what it must; a wrong one is not applied."""
    if (decided.epoch, decided.step, len(decided.keep)) != (row.epoch, snapshot.step, len(snapshot.layers)):
        return False
    lengths = [layer.length for layer in snapshot.layers]
    drops = slots_to_drop(lengths, row.grant.layer_slots, row.grant.parameters, snapshot.incoming, snapshot.ahead)
    return all(
        keep.shape == layer.positions.shape and all(np.count_nonzero(head) == layer.length - drop for head in keep)
        for keep, layer, drop in zip(decided.keep, snapshot.layers, drops, strict=True)
    )


def _pool_key(grant: Grant) -> PoolKey:
    """Rows share a pool if their budgets and their evidence have equal shapes."""
    return grant.layer_slots, grant.by_head, grant.codecs, grant.policy, grant.preset, grant.parameters.window
