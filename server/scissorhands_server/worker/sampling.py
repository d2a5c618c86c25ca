"""Choosing the next token of one request, by transformers' own logits processors.

Every row is sampled by itself, on the CPU, in float32 and with its own generator, so what a request draws does not
depend on who shares its batch.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from scissorhands.errors import EngineError, InvalidRequestError
from scissorhands.v1 import generation_pb2

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
# Below it the best token is as good as certain, and float32 logits divided by much less overflow: taken as greedy.
SMALLEST_TEMPERATURE = 1e-5
SMALLEST_PENALTY = 1e-5
# torch's CPU generator uses 32 bits of a seed, so a drawn one has no more; it is also shorter to type again.
_SEED_BITS = 32


@dataclass(frozen=True)
class SamplingParameters:
    """How the tokens of one request are chosen; checked.

    Args:
        temperature: Softmax temperature; 0 is greedy.
        top_p: Nucleus mass kept; 1 keeps all.
        top_k: Most likely tokens kept; 0 keeps all.
        repetition_penalty: Penalty on tokens already seen; 1 penalizes nothing.
        seed: Seed of the random numbers; None when decoding is greedy.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def validate(sampling: generation_pb2.Sampling, vocabulary: int) -> SamplingParameters:
    """Check what a request asks for, and draw a seed if it needs one and names none.

    Args:
        sampling: The message; an empty one is greedy.
        vocabulary: Token ids of the model.

    Raises:
        InvalidRequestError: A value is not a finite number in its range.
    """
    temperature = sampling.temperature
    if not 0 <= temperature <= MAX_TEMPERATURE:  # False for NaN too.
        raise InvalidRequestError("sampling.temperature", f"must be 0 to {MAX_TEMPERATURE:g}, got {temperature:g}")
    if temperature < SMALLEST_TEMPERATURE:
        temperature = 0.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidRequestError("sampling.top_p", f"must be above 0 and at most 1, got {top_p:g}")
    if sampling.top_k > vocabulary:
        raise InvalidRequestError(
            "sampling.top_k",
            f"must be at most the vocabulary of {vocabulary} tokens, or 0 for all, got {sampling.top_k}",
        )
    penalty = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0 < penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            "sampling.repetition_penalty", f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}, got {penalty:g}"
        )
    seed = None
    if temperature > 0:
        seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(_SEED_BITS)
    # A smaller penalty than this would only overflow.
    return SamplingParameters(temperature, top_p, sampling.top_k, max(penalty, SMALLEST_PENALTY), seed)


class Sampler:
    """Draws the tokens of one request, in order. Not shared between threads.

    Args:
        parameters: How to choose.
    """

    def __init__(self, parameters: SamplingParameters) -> None:
        self._greedy = parameters.greedy
        self._penalized = parameters.repetition_penalty != 1
        self._processors = _processors(parameters)
        self._generator = torch.Generator(device="cpu")
        if parameters.seed is not None:
            self._generator.manual_seed(parameters.seed)

    def next(self, logits: torch.Tensor, ids: Sequence[int]) -> int:
        """Return the next token's id; of equally likely ones, greedy takes the lowest.

        Args:
            logits: ``[vocabulary]``, the model's output; not changed.
            ids: Prompt and answer so far.

        Raises:
            EngineError: The model returned logits that are not numbers.
        """
        scores = logits.detach().to("cpu", torch.float32).unsqueeze(0)
        best = _best(scores)
        # Of numbers that include NaN that is the largest, and minus infinity leaves nothing to choose.
        if not math.isfinite(scores[0, best]):
            raise EngineError("the model returned logits that are not finite numbers")
        if self._processors:
            # Only the repetition penalty looks at what came before.
            before = cast("torch.LongTensor", torch.tensor([ids if self._penalized else []], dtype=torch.long))
            scores = self._processors(before, scores)
            best = _best(scores)
        if self._greedy:
            return best
        chances = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._generator))


def _best(scores: torch.Tensor) -> int:
    """Return the place of the largest of ``[1, vocabulary]`` scores, the first one if there are several."""
    # By numpy, which takes a tenth of torch's time.
    return int(scores.numpy().argmax())


def _processors(parameters: SamplingParameters) -> LogitsProcessorList:
    """Return the processors in the order in which transformers' ``generate`` applies them."""
    processors = LogitsProcessorList()
    if parameters.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty))
    if parameters.greedy:
        return processors
    if parameters.temperature != 1:
        processors.append(TemperatureLogitsWarper(parameters.temperature))
    if parameters.top_k > 0:
        processors.append(TopKLogitsWarper(parameters.top_k))
    if parameters.top_p < 1:
        processors.append(TopPLogitsWarper(parameters.top_p))
    return processors
