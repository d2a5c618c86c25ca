"""Perplexity: teacher-forced losses of sequences under a budget, keeping exactly what decoding would keep.

A row that decodes token by token takes a snapshot when ``L`` more tokens fit and evicts when it is full. In between,
nothing depends on how many tokens come at once, so they are fed in blocks that end where a snapshot or an eviction is
due. There is no prompt: the first token is decoded like every other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.cache import ResidentCache
from scissorhands.codec.statistics import attached
from scissorhands.errors import EngineError
from scissorhands.evaluation.sizes import Sizes, sizes_of
from scissorhands.evaluation.statistics import Losses
from scissorhands.evaluation.texts import Tokens
from scissorhands.probe import model_shape
from scissorhands.row import Planner, Row
from scissorhands.view import StepView

# Bounds on the memory of one forward pass. Neither changes a result.
MOST_ROWS = 8
MOST_TOKENS = 64


@dataclass(frozen=True)
class Measured:
    """The losses of sequences under one grant.

    Args:
        losses: ``[sequences, length - 1]`` in nats; column ``i`` is the loss of token ``i + 1``.
        first_eviction: Tokens that had been seen at the first eviction; losses from this column on are affected by
            it. None if nothing was evicted.
        sizes: Bytes of a row.
    """

    losses: Losses
    first_eviction: int | None
    sizes: Sizes


def measure(
    model: PreTrainedModel,
    grant: Grant,
    sequences: Tokens,
    progress: Callable[[int], object] = lambda _: None,
    planner_for: Callable[[torch.Tensor], Planner | None] = lambda _: None,
) -> Measured:
    """Measure the losses of sequences.

    Args:
        model: A model that attends through our attention (:func:`scissorhands.probe.probe`).
        grant: The budget and the policy's numbers of each sequence.
        sequences: ``[sequences, length]`` tokens.
        progress: Told how many more tokens are done.
        planner_for: Returns who plans for a batch of rows, ``[rows, tokens]`` tokens that they will be fed; they are
            named by their index in it. None: the grant's policy.

    Raises:
        EngineError: The model's losses are not finite.
    """
    tokens = torch.from_numpy(sequences).to(model.device)
    losses, first_eviction, sizes = [], None, None
    for start in range(0, len(tokens), MOST_ROWS):
        batch = tokens[start : start + MOST_ROWS]
        # The last token is only predicted, never fed.
        fed = batch[:, :-1]
        cache = ResidentCache(
            model_shape(model), model.dtype, model.device, planner_for(fed), statistics=attached(model)
        )
        rows = [cache.add_row(grant, name=str(index), limit=fed.shape[1]) for index in range(len(batch))]
        sizes = sizes_of(cache)
        parts, done = [], 0
        for logits in feed(model, cache, rows, fed):
            if rows[0].epoch and first_eviction is None:
                first_eviction = done
            parts.append(_losses(logits, batch[:, done + 1 : done + 1 + logits.shape[1]]))
            done += logits.shape[1]
            progress(logits.shape[1] * len(rows))
        losses.append(torch.cat(parts, dim=1))
    measured = torch.cat(losses).cpu().numpy()
    if not np.isfinite(measured).all():
        raise EngineError(f"losses under policy {grant.policy} are not finite; try --dtype float32")
    assert sizes is not None
    return Measured(measured, first_eviction, sizes)


def feed(
    model: PreTrainedModel, cache: ResidentCache, rows: Sequence[Row], tokens: torch.Tensor, most: int = MOST_TOKENS
) -> Iterator[torch.Tensor]:
    """Feed tokens to rows of equal grants and lengths, block by block, as decoding would.

    Args:
        model: The model.
        cache: The rows' cache.
        rows: The rows.
        tokens: ``[rows, tokens]``.
        most: Most tokens of a block.

    Yields:
        ``[rows, block, vocabulary]`` logits of each block.
    """
    for block in blocks(cache, rows, tokens.shape[1], most):
        yield _forward(model, rows, tokens[:, block])


def blocks(cache: ResidentCache, rows: Sequence[Row], total: int, most: int = MOST_TOKENS) -> Iterator[slice]:
    """Make room in rows of equal grants, block by block, as decoding would.

    Args:
        cache: The rows' cache.
        rows: The rows.
        total: Tokens that each row will be fed.
        most: Most tokens of a block.

    Yields:
        The tokens of each block. Whoever asks for the next has appended them to all rows.
    """
    done = 0
    while done < total:
        for row in rows:
            cache.prepare_decode(row)
        size = min(most, total - done, *(_until_due(row) for row in rows))
        yield slice(done, done + size)
        done += size


def _until_due(row: Row) -> int:
    """Return how many tokens fit before a snapshot or an eviction is due."""
    ahead = row.slack - row.grant.parameters.lookahead
    return ahead if ahead > 0 else row.slack


@torch.inference_mode()
def _forward(model: PreTrainedModel, rows: Sequence[Row], tokens: torch.Tensor) -> torch.Tensor:
    view = StepView(rows)
    first = torch.tensor([[row.step] for row in rows], device=tokens.device)
    positions = first + torch.arange(tokens.shape[1], device=tokens.device)
    logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, cache=view, use_cache=True).logits
    view.commit(tokens.shape[1])
    return logits


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return flat.view(targets.shape)
