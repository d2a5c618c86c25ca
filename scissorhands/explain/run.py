"""Running ``explain``: from what was asked to the page."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from scissorhands.budget import BudgetRequest
from scissorhands.eos import eos_ids
from scissorhands.errors import InvalidRequestError
from scissorhands.evaluation.loading import load
from scissorhands.explain.page import page
from scissorhands.explain.record import record
from scissorhands.explain.tokens import token_texts
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.profile import Profile


@dataclass(frozen=True)
class Request:
    """What to show.

    Args:
        model: A folder or a hub id.
        prompt: The prompt.
        max_new_tokens: Most tokens to generate.
        policy: ``name`` or ``name:preset``.
        budget: A share of prompt plus new tokens.
        dtype: As in :func:`scissorhands.evaluation.loading.load`.
        device: As in :func:`scissorhands.evaluation.loading.load`.
    """

    model: str
    prompt: str
    max_new_tokens: int
    policy: str
    budget: BudgetRequest
    dtype: str
    device: str


def run(request: Request, console: Console) -> str:
    """Run the prompt and return the page; ``console`` shows how far it is.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
        EngineError: The model's logits are not finite.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = load(request.model, request.dtype, request.device)
    shape = model_shape(model)
    if not shape.global_layers:
        raise InvalidRequestError("model", "has only sliding layers, from which nothing is ever evicted")
    prompt = _prompt_ids(request, model, tokenizer)
    name, _, preset = request.policy.partition(":")
    length = len(prompt) + request.max_new_tokens
    granted = grant(request.budget, PolicyRequest(name, preset), shape, length, Profile.find(request.model))
    with _progress(console) as progress:
        task = progress.add_task("reading and decoding", total=length - 1)
        recording = record(
            model,
            granted,
            prompt,
            request.max_new_tokens,
            eos_ids(model, tokenizer),
            lambda row: progress.update(task, completed=row.step),
        )
    texts = token_texts(tokenizer, recording.ids)
    return page(recording, texts, Path(request.model).resolve().name, f"{100 * request.budget.amount:g}%")


def _prompt_ids(request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # Not verbose: a prompt that is too long gets our error.
    ids: list[int] = tokenizer(request.prompt, verbose=False)["input_ids"] if request.prompt else []
    if not ids:
        raise InvalidRequestError("prompt", "must not be empty")
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and len(ids) + request.max_new_tokens > most:
        raise InvalidRequestError(
            "prompt",
            f"{len(ids)} tokens and {request.max_new_tokens} new ones are more than the model's {most} positions",
        )
    return ids


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} tokens"))
    return Progress(*columns, TimeElapsedColumn(), console=console)
