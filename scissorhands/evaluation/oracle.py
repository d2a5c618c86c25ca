"""The oracle: a clairvoyant that keeps the slots that future attention needs. It is the floor of dropping tokens.

A first pass with the full cache tells the attention that every token will still receive after each eviction. In the
second pass plans are those of H2O, whose evidence is attention mass, with the mass of the future in place of the past
and no recent slots exempt. No server can be asked for it: it needs the text that is yet to come.

It is the floor for choices that are made by attention, slot by slot, with the full cache's attention: once slots are
missing, later layers attend a little differently, and a slot matters by its value too. The variant ``oracle:values``
weights a slot's future attention by the length of its value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant, slots_to_drop
from scissorhands.evaluation.recorder import interval_sums
from scissorhands.evaluation.request import ORACLES, Choice
from scissorhands.evaluation.setup import Setup
from scissorhands.grant import PolicyRequest, grant
from scissorhands.plan import plan
from scissorhands.row import PendingPlan, Row
from scissorhands.snapshot import LayerEvidence, Plan, Snapshot

# A planner is asked only if there is a snapshot before the eviction; one token ahead is the least.
_BASE = PolicyRequest("h2o", parameters={"recent": 0, "lookahead": 1})

Attention = npt.NDArray[np.float32]


def choice_grant(setup: Setup, choice: Choice) -> Grant:
    """Resolve a choice that may be an oracle: it has the budget, the sinks and the drop that other policies have.

    Raises:
        InvalidRequestError: The policy's numbers do not allow the budget.
    """
    if choice.policy not in ORACLES:
        return setup.grant(choice)
    return grant(choice.request, _BASE, setup.shape, setup.request.length)


def eviction_steps(granted: Grant, tokens: int) -> list[int]:
    """Return how many tokens a row has seen at each of its evictions when it decodes ``tokens`` tokens.

    Neither the policy nor the text changes that: the budgets and the numbers of the grant alone do.
    """
    lengths, steps = [0] * len(granted.layer_slots), []
    for step in range(tokens):
        drops = slots_to_drop(lengths, granted.layer_slots, granted.parameters, 1)
        if any(drops):
            steps.append(step)
        lengths = [length - drop + 1 for length, drop in zip(lengths, drops, strict=True)]
    return steps


@dataclass(frozen=True)
class Ready:
    """A plan that is there at once."""

    plan: Plan

    def take(self, timeout: float) -> Plan | None:
        """Return the plan."""
        del timeout
        return self.plan


class OraclePlanner:
    """Plans by the attention that slots will still receive; asked by a cache like any other planner.

    Args:
        steps: Tokens seen at each eviction.
        future: Of each layer of a row's pool, ``[sequences, kv_heads, evictions, length]``: what each token receives
            from the first query after the eviction on. The name of a row is the index of its sequence.
    """

    def __init__(self, steps: list[int], future: list[Attention]) -> None:
        self._eviction = {step: index for index, step in enumerate(steps)}
        self._future = future

    def submit(self, row: Row, snapshot: Snapshot) -> PendingPlan | None:
        """Plan at once."""
        sequence, eviction = int(row.name), self._eviction[snapshot.step + snapshot.ahead]
        foreseen = tuple(
            LayerEvidence(
                layer.positions,
                {"mass": np.take_along_axis(future[sequence, :, eviction], layer.positions, axis=1)},
            )
            for layer, future in zip(snapshot.layers, self._future, strict=True)
        )
        told = Snapshot(snapshot.epoch, snapshot.step, snapshot.ahead, snapshot.incoming, foreseen)
        return Ready(plan(row.grant, told))


def foresee(
    model: PreTrainedModel,
    granted: Grant,
    tokens: torch.Tensor,
    *,
    by_values: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> OraclePlanner:
    """Run the first pass over sequences and return the planner of the second.

    Memory: ``sequences x layers x kv_heads x evictions x length`` float32; 75 MB a sequence of 2,048 tokens with 30
    layers of 3 heads at a fifth of the length, dropping 16 at once.

    Args:
        model: A model that attends through our attention.
        granted: What the rows of the second pass are granted.
        tokens: ``[sequences, length]``, what will be fed.
        by_values: Whether attention counts by the Euclidean norm of the token's value.
        progress: Told how many more tokens are done.
    """
    steps = eviction_steps(granted, tokens.shape[1])
    norms: list[list[torch.Tensor]] = []

    def finished(_index: int, row: Row) -> None:
        norms.append([layer.values[row.index].float().norm(dim=-1) for layer in row.pool.layers])

    sums = interval_sums(model, tokens, steps, progress=progress, finished=finished)
    for index, layer in enumerate(sums):
        suffix_sums(layer)
        if by_values:
            layer.mul_(torch.stack([sequence[index] for sequence in norms]).unsqueeze(2))
    future = [layer.cpu().numpy() for layer in sums]
    if granted.by_head:
        future = [layer[:, head : head + 1] for layer in future for head in range(layer.shape[1])]
    return OraclePlanner(steps, future)


def suffix_sums(sums: torch.Tensor) -> None:
    """Add to each interval ``[..., intervals, length]`` all later ones, in place."""
    for interval in range(sums.shape[-2] - 2, -1, -1):
        sums[..., interval, :] += sums[..., interval + 1, :]
