"""One forward pass of the model over rows of the cache."""

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from scissorhands.row import Row
from scissorhands.view import StepView


class ModelStep:
    """Runs forward passes.

    Args:
        model: A model that has been switched to our attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Most models can skip the vocabulary projection of all but the last tokens.
        self._skips = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to rows in which there is room, and count them there.

        Args:
            rows: The rows.
            tokens: Token ids for each row, equally many.

        Returns:
            ``[rows, vocabulary]`` float32 logits after each row's last token, on the CPU.
        """
        return self.scores(rows, tokens, 1)[:, 0]

    def scores(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], last: int) -> torch.Tensor:
        """Do the same and return the logits after each of the ``last`` tokens: ``[rows, last, vocabulary]``."""
        view = StepView(rows)
        device = self._model.device
        incoming = len(tokens[0])
        positions = [list(range(row.step, row.step + incoming)) for row in rows]
        output = self._model(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=torch.tensor(positions, device=device),
            cache=view,
            use_cache=True,
            **({"logits_to_keep": last} if self._skips else {}),
        )
        view.commit(incoming)
        logits: torch.Tensor = output.logits[:, -last:].float().cpu()
        return logits
