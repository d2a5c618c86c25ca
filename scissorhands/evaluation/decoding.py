"""Prompts and answers as a worker handles them: prompts are read chunk by chunk, answers decoded token by token."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.cache import ResidentCache
from scissorhands.evaluation.sizes import Sizes, sizes_of
from scissorhands.evaluation.texts import Tokens
from scissorhands.probe import model_shape
from scissorhands.step import ModelStep

# Bound on the memory of the rows at once; does not change a result.
MOST_ROWS = 4


class Decoder:
    """Rows of equal grants and prompts of equal lengths.

    Args:
        model: A model that attends through our attention.
        grant: The budget and the policy's numbers of each row.
        prompts: ``[rows, tokens]`` tokens.
        new_tokens: Most tokens of an answer.
    """

    def __init__(self, model: PreTrainedModel, grant: Grant, prompts: Tokens, new_tokens: int) -> None:
        self._prompts = prompts.tolist()
        self._step = ModelStep(model)
        self._cache = ResidentCache(model_shape(model), model.dtype, model.device)
        # The last token is chosen, but never appended.
        limit = prompts.shape[1] + new_tokens - 1
        self._rows = [self._cache.add_row(grant, limit=limit) for _ in self._prompts]

    def sizes(self) -> Sizes:
        """Return the bytes of a row."""
        return sizes_of(self._cache)

    @torch.inference_mode()
    def read(self, progress: Callable[[int], object] = lambda _: None) -> torch.Tensor:
        """Read the prompts, on the grid of chunks.

        Args:
            progress: Told how many more tokens are read.

        Returns:
            ``[rows, vocabulary]`` float32 logits after the last tokens.
        """
        found = []
        for row, prompt in zip(self._rows, self._prompts, strict=True):
            logits = torch.empty(0)
            while row.step < len(prompt):
                size = row.next_chunk(len(prompt) - row.step)
                self._cache.prepare_prefill(row, size)
                logits = self._step([row], [prompt[row.step : row.step + size]])
                progress(size)
            found.append(logits[0])
        return torch.stack(found)

    @torch.inference_mode()
    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each row; return ``[rows, vocabulary]`` float32 logits after them."""
        for row in self._rows:
            self._cache.prepare_decode(row)
        return self._step(self._rows, [[token] for token in tokens])


def answers(
    model: PreTrainedModel,
    grant: Grant,
    prompts: Tokens,
    new_tokens: int,
    progress: Callable[[int], object] = lambda _: None,
) -> Tokens:
    """Return the greedy answers to prompts, ``[prompts, new_tokens]``; none ends early.

    Args:
        model: A model that attends through our attention.
        grant: The budget and the policy's numbers of each row.
        prompts: ``[prompts, tokens]`` tokens.
        new_tokens: Tokens of each answer.
        progress: Told how many more tokens are done.
    """
    found: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(prompts), MOST_ROWS):
        decoder = Decoder(model, grant, prompts[start : start + MOST_ROWS], new_tokens)
        chosen = [decoder.read(progress).argmax(dim=-1)]
        while len(chosen) < new_tokens:
            chosen.append(decoder.append(chosen[-1].tolist()).argmax(dim=-1))
            progress(len(chosen[-1]))
        found.append(torch.stack(chosen, dim=1).numpy())
    return np.concatenate(found)
