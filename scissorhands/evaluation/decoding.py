"""Prompts and answers as a worker handles them: prompts are read chunk by chunk, answers decoded token by token."""

from collections.abc import Callable, Container, Sequence
from itertools import takewhile

import numpy as np
import torch
from transformers import PreTrainedModel

from scissorhands.budget import Grant
from scissorhands.cache import ResidentCache
from scissorhands.codec.statistics import attached
from scissorhands.evaluation.recalling import Recall, Recaller
from scissorhands.evaluation.sizes import Sizes, sizes_of
from scissorhands.evaluation.texts import Tokens
from scissorhands.probe import model_shape
from scissorhands.recall import ROUNDS, last_tokens
from scissorhands.row import Eviction
from scissorhands.step import ModelStep

# Bound on the memory of the rows at once; does not change a result.
MOST_ROWS = 4


class Decoder:
    """Rows of equal grants.

    Args:
        model: A model that attends through our attention.
        grant: The budget and the policy's numbers of each row.
        prompts: The tokens of each row's prompt.
        new_tokens: Most tokens of an answer.
        recall: How rows recall what they have evicted; None: they do not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        grant: Grant,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        recall: Recall | None = None,
    ) -> None:
        self._prompts = prompts
        self._step = ModelStep(model)
        self._cache = ResidentCache(model_shape(model), model.dtype, model.device, statistics=attached(model))
        # The last token is chosen, but never appended.
        self._rows = [self._cache.add_row(grant, limit=len(prompt) + new_tokens - 1) for prompt in prompts]
        self._appended = 0
        shape = self._cache.shape
        most = last_tokens(shape.layers, len(shape.global_layers))
        self._last = min(recall.last, most) if recall else 0
        self._every = recall.every if recall else 0
        self.recallers = [Recaller(self._step, self._cache, row, recall) for row in self._rows] if recall else []

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
        for index, (row, prompt) in enumerate(zip(self._rows, self._prompts, strict=True)):
            logits = torch.empty(0)
            while row.step < len(prompt):
                size = row.next_chunk(len(prompt) - row.step)
                self._keep(index, self._cache.prepare_prefill(row, size))
                # Where a row recalls, the last tokens of the last chunk are read apart: room for them is made already.
                for part in self._parts(row.step, size, len(prompt)):
                    if self.recallers and part.stop == len(prompt):
                        self.recallers[index].recall(prompt[part], ROUNDS)
                    logits = self._step([row], [prompt[part]])
                progress(size)
            found.append(logits[0])
        return torch.stack(found)

    @torch.inference_mode()
    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each row; return ``[rows, vocabulary]`` float32 logits after them."""
        self._appended += 1
        for index, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            self._keep(index, self._cache.prepare_decode(row))
            if self._every and self._appended % self._every == 0:
                self.recallers[index].recall([token])
        return self._step(self._rows, [[token] for token in tokens])

    def _parts(self, step: int, size: int, total: int) -> list[slice]:
        """Return in which parts to read a chunk of a prompt of ``total`` tokens."""
        if not self._last or step + size < total or size <= self._last:
            return [slice(step, step + size)]
        return [slice(step, total - self._last), slice(total - self._last, total)]

    def _keep(self, index: int, eviction: Eviction | None) -> None:
        if self.recallers:
            self.recallers[index].keep(eviction)

    def answer(
        self,
        new_tokens: int,
        eos: Container[int] = (),
        progress: Callable[[int], object] = lambda _: None,
    ) -> list[list[int]]:
        """Read the prompts and decode greedily; return each row's answer.

        Args:
            new_tokens: Most tokens of an answer.
            eos: Tokens that end an answer, and are not part of it.
            progress: Told how many more tokens are done.
        """
        chosen = [self.read(progress).argmax(dim=-1).tolist()]
        ended = [token in eos for token in chosen[0]]
        while len(chosen) < new_tokens and not all(ended):
            # A row whose answer has ended goes on unheard, until all have.
            chosen.append(self.append(chosen[-1]).argmax(dim=-1).tolist())
            ended = [before or token in eos for before, token in zip(ended, chosen[-1], strict=True)]
            progress(len(chosen[-1]))
        return [list(takewhile(lambda token: token not in eos, row)) for row in zip(*chosen, strict=True)]


def answers(
    model: PreTrainedModel,
    grant: Grant,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    progress: Callable[[int], object] = lambda _: None,
) -> Tokens:
    """Return the greedy answers to prompts, ``[prompts, new_tokens]``; none ends early.

    Args:
        model: A model that attends through our attention.
        grant: The budget and the policy's numbers of each row.
        prompts: The tokens of each.
        new_tokens: Tokens of each answer.
        progress: Told how many more tokens are done.
    """
    found: list[list[int]] = []
    for start in range(0, len(prompts), MOST_ROWS):
        decoder = Decoder(model, grant, prompts[start : start + MOST_ROWS], new_tokens)
        found += decoder.answer(new_tokens, progress=progress)
    return np.array(found, dtype=np.int64)
