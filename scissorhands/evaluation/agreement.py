"""Agreement: what a budget changes in the answers of a model, against its full cache."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.divergence import divergence
from scissorhands.errors import EngineError
from scissorhands.evaluation.decoding import MOST_ROWS, Decoder, answers
from scissorhands.evaluation.sizes import Sizes
from scissorhands.evaluation.texts import Tokens


@dataclass(frozen=True)
class Agreement:
    """How answers under a budget compare to those of the full cache.

    Args:
        nats: ``[prompts, new_tokens]`` float64, the divergence of the next-token distributions from the full cache's,
            both along the full cache's answer.
        same: ``[prompts, new_tokens]`` bool, whether the most likely tokens are the same there.
        equal: ``[prompts, new_tokens]`` bool, whether the budget's own answer has the same token at the same place.
        sizes: Bytes of a row.
    """

    nats: npt.NDArray[np.float64]
    same: npt.NDArray[np.bool_]
    equal: npt.NDArray[np.bool_]
    sizes: Sizes

    @property
    def first_divergence(self) -> list[int | None]:
        """Of each answer, the tokens before the first that differs; None if none does."""
        return [None if row.all() else int(np.argmin(row)) for row in self.same]


def agree(
    model: PreTrainedModel,
    grant: Grant,
    full: Grant,
    prompts: Tokens,
    expected: Tokens,
    progress: Callable[[int], object] = lambda _: None,
) -> Agreement:
    """Compare answers to those of the full cache.

    Args:
        model: A model that attends through our attention.
        grant: The budget and the policy's numbers.
        full: The grant of the full cache.
        prompts: ``[prompts, tokens]`` tokens.
        expected: ``[prompts, new_tokens]``, the full cache's answers.
        progress: Told how many more tokens are done, of :func:`work` in all.

    Raises:
        EngineError: The model's distributions are not finite.
    """
    nats, same, sizes = [], [], None
    for start in range(0, len(prompts), MOST_ROWS):
        batch = slice(start, start + MOST_ROWS)
        decoders = [Decoder(model, each, prompts[batch].tolist(), expected.shape[1]) for each in (grant, full)]
        sizes = decoders[0].sizes()
        logits, reference = (decoder.read(progress) for decoder in decoders)
        columns = []
        for index in range(expected.shape[1]):
            if index:
                # Until an answer differs, it is what the budget's own answer would be.
                before = expected[batch, index - 1].tolist()
                logits, reference = (decoder.append(before) for decoder in decoders)
                progress(2 * len(before))
            columns.append((divergence(logits, reference)[0], logits.argmax(dim=-1)))
        nats.append(torch.stack([column for column, _ in columns], dim=1).numpy())
        chosen = torch.stack([column for _, column in columns], dim=1).numpy()
        same.append(chosen == expected[batch])
    assert sizes is not None
    all_nats, all_same = np.concatenate(nats), np.concatenate(same)
    if not np.isfinite(all_nats).all():
        raise EngineError(f"distributions under policy {grant.policy} are not finite; try --dtype float32")
    equal = all_same.copy()
    differs = np.nonzero(~all_same.all(axis=1))[0]
    if len(differs):
        own = answers(model, grant, prompts[differs].tolist(), expected.shape[1], progress)
        equal[differs] = own == expected[differs]
    return Agreement(all_nats, all_same, equal, sizes)


def work(prompts: Tokens, new_tokens: int) -> int:
    """Return how many tokens are fed at most: along the full cache's answers in both caches, and the own answers."""
    return 3 * len(prompts) * (int(prompts.shape[1]) + new_tokens - 1)
