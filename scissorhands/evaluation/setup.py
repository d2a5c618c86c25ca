"""What every measurement starts with: the model, the sequences, and a record of both."""

import os
import platform
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from scissorhands import __version__
from scissorhands.budget import HALF_BYTES, Grant, ModelShape
from scissorhands.calibrated import Calibrated
from scissorhands.codec.statistics import attach
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.loading import load, weights_digest
from scissorhands.evaluation.request import FULL, Choice, Request
from scissorhands.evaluation.results import Results
from scissorhands.evaluation.texts import Tokens, sequences_of
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.profile import Profile


@dataclass(frozen=True)
class Setup:
    """A model and what it is measured on.

    Args:
        model: The model, which attends through our attention.
        tokenizer: Its tokenizer.
        request: What was asked for.
        profile: What eviction costs in the model's heads; None if that was not measured.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    request: Request
    profile: Profile | None = None

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return model_shape(self.model)

    def sequences(self) -> Tokens:
        """Cut the sequences that were asked for, ``[sequences, length]``.

        Raises:
            InvalidRequestError: A text is too short, or there are more texts than sequences.
        """
        return sequences_of(list(self.request.texts), self.tokenizer, self.request.sequences, self.request.length)

    def grant(self, choice: Choice, tokens: int | None = None) -> Grant:
        """Resolve a choice for sequences of ``tokens``, by default of the length that was asked for.

        Raises:
            InvalidRequestError: The policy's numbers do not allow the budget.
        """
        name, _, preset = choice.policy.partition(":")
        total = self.request.length if tokens is None else tokens
        # Compression is counted with keys and values of 16 bits, whatever the number type that runs.
        shape = replace(self.shape, element_bytes=HALF_BYTES) if choice.compression else self.shape
        return grant(choice.request, PolicyRequest(name, preset), shape, total, self.profile, choice.codec)

    def full_grant(self, tokens: int | None = None) -> Grant:
        """Return the grant of the full cache for sequences of ``tokens``."""
        return self.grant(FULL, tokens)

    def results(self, command: str, **settings: Any) -> Results:
        """Return empty results.

        Args:
            command: The command's name: a file of one command is not resumed by another.
            settings: What decides the figures besides the model, the texts and the sizes.
        """
        return Results({"command": command, **self._settings(), **settings}, _environment(self.model))

    def _settings(self) -> dict[str, Any]:
        request = self.request
        return {
            "model": request.model,
            "weights_sha256": weights_digest(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "texts": [{"name": text.name, "sha256": text.sha256} for text in request.texts],
            "sequences": request.sequences,
            "length": request.length,
        }


def prepare(request: Request) -> Setup:
    """Load what was asked for.

    Raises:
        InvalidRequestError: The model cannot be loaded, or its context is shorter than the sequences.
        UnsupportedModelError: The model would not be served rightly.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = load(request.model, request.dtype, request.device)
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and request.length > most:
        raise InvalidRequestError(
            "length", f"must be at most {most}, the model's longest context, got {request.length}"
        )
    calibrated = Calibrated.find(request.model, request.profile)
    attach(model, calibrated.statistics)
    return Setup(model, tokenizer, request, calibrated.profile)


def tell_anew(request: Request, different: list[str], console: Console) -> None:
    """Say that a file is of other settings, if it is."""
    if different:
        console.print(f"{request.out} is of other settings ({', '.join(different)}): measuring anew")


def _environment(model: PreTrainedModel) -> dict[str, Any]:
    cuda = model.device.type == "cuda"
    return {
        "scissorhands": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(model.device) if cuda else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
