"""One forward pass of the model over rows of the cache."""

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from scissorhands.captured import CapturedSteps
from scissorhands.peek import PeekView
from scissorhands.row import Row
from scissorhands.view import Before, StepView


class ModelStep:
    """Runs forward passes.

    Args:
        model: A model that has been switched to our attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Most models can skip the vocabulary projection of all but the last tokens.
        self._skips = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._captured = CapturedSteps(model, self._kept(1))

    def __call__(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], before: Before | None = None
    ) -> torch.Tensor:
        """Append tokens to rows in which there is room, and count them there.

        Args:
            rows: The rows.
            tokens: Token ids for each row, equally many.
            before: See :class:`~scissorhands.view.StepView`. If it raises, the pass can be repeated, unless it is one
                of several tokens over a sliding layer.

        Returns:
            ``[rows, vocabulary]`` float32 logits after each row's last token, on the CPU.
        """
        # What others do between layers is no part of a graph.
        logits = self._captured(rows, tokens) if before is None else None
        return self._read(StepView(rows, before), tokens, 1)[:, 0] if logits is None else logits

    def scores(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], last: int) -> torch.Tensor:
        """Do the same and return the logits after each of the ``last`` tokens: ``[rows, last, vocabulary]``."""
        return self._read(StepView(rows), tokens, last)

    def peek(self, row: Row, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Return what tokens would ask for if they were read now; the row stays as it is.

        Over sliding layers it takes one token only: their rings have no room for more.

        Args:
            row: The row, in which there is room for them.
            tokens: Token ids.

        Returns:
            Of each layer of the model, ``[query_heads, tokens, head_dim]`` queries times the factor on the scores.
        """
        view = PeekView(row)
        try:
            self._pass(view, [tokens], 1)
        finally:
            view.leave()
        return view.queries

    def _read(self, view: StepView, tokens: Sequence[Sequence[int]], last: int) -> torch.Tensor:
        logits = self._pass(view, tokens, last)
        view.commit(len(tokens[0]))
        return logits

    def _pass(self, view: StepView, tokens: Sequence[Sequence[int]], last: int) -> torch.Tensor:
        rows = view.rows
        device = self._model.device
        incoming = len(tokens[0])
        positions = [list(range(row.step, row.step + incoming)) for row in rows]
        output = self._model(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=torch.tensor(positions, device=device),
            cache=view,
            use_cache=True,
            **self._kept(last),
        )
        logits: torch.Tensor = output.logits[:, -last:].float().cpu()
        return logits

    def _kept(self, last: int) -> dict[str, int]:
        return {"logits_to_keep": last} if self._skips else {}
