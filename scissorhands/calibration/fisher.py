"""Recording one sequence: what every layer attends with, and how the model's predictions hang on the outputs.

The model draws one token at each position from its own prediction, and the sum of their log-probabilities is
differentiated by all attention outputs in one backward pass. Gradients of different positions' draws are independent
with mean zero, so in expectation the squares of the sum are the sum of the squares (Theis et al. 2018, arXiv
1801.05787, section 2.2).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from scissorhands.budget import ModelShape
from scissorhands.errors import EngineError
from scissorhands.new_tokens import NewTokens
from scissorhands.view import StepView

# Positions whose probabilities are held at once while tokens are drawn.
_MOST_DRAWN = 256
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Recording:
    """One sequence of T tokens in the N global layers of a model; in 16 bits, on the host.

    Args:
        queries: ``[N, query_heads, T, head_dim]``, already scaled.
        keys: ``[N, kv_heads, T, head_dim]``.
        values: ``[N, kv_heads, T, head_dim]``.
        gradients: ``[samples, N, query_heads, T, head_dim]``, of the drawn tokens' log-probabilities in nats by the
            attention outputs.
        kinds: ``[1, T]`` uint8, kinds of the tokens (:mod:`scissorhands.kinds`); None if nobody tells.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gradients: torch.Tensor
    kinds: torch.Tensor | None


def record(model: PreTrainedModel, shape: ModelShape, tokens: torch.Tensor, draws: torch.Tensor) -> Recording:
    """Run a sequence through the full model, forward once and backward once for each sample.

    Args:
        model: A model that attends through our attention and whose parameters require no gradients.
        shape: Its sizes; at least one layer is global.
        tokens: ``[T]`` token ids.
        draws: ``[samples, T]`` uniform random numbers in [0, 1), which decide the tokens that are drawn; of no samples,
            no gradients are recorded.

    Raises:
        EngineError: The gradients are not finite.
    """
    view = _FullView(shape)
    with torch.set_grad_enabled(len(draws) > 0):
        positions = torch.arange(len(tokens), device=tokens.device).unsqueeze(0)
        output = model(input_ids=tokens.unsqueeze(0), position_ids=positions, cache=view, use_cache=True)
        logits = output.logits[0].float()
        gradients = []
        for index, numbers in enumerate(draws):
            drawn = _draw(logits.detach(), numbers.to(tokens.device))
            likelihood = -functional.cross_entropy(logits, drawn, reduction="sum")
            more = index < len(draws) - 1
            by_layer = torch.autograd.grad(likelihood, view.outputs, retain_graph=more)
            gradients.append(torch.stack([_half(gradient[0]) for gradient in by_layer]))
    queries, keys, values = (torch.stack(parts) for parts in (view.queries, view.keys, view.values))
    found = torch.stack(gradients) if gradients else queries.new_zeros(0, *queries.shape)
    if not all(part.isfinite().all() for part in (queries, keys, values, found)):
        raise EngineError("attention or its gradients are not finite in 16 bits; try --dtype bfloat16")
    return Recording(queries, keys, values, found, view.kinds)


def full_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Attend to all tokens that a query may see.

    Args:
        queries: ``[batch, query_heads, T, head_dim]``, scaled; the heads of a group are adjacent.
        keys: ``[batch, kv_heads, T, head_dim]``.
        values: ``[batch, kv_heads, T, head_dim]``.
        window: Tokens that a query sees, its own included; 0 for all up to its own.

    Returns:
        ``[batch, query_heads, T, head_dim]``.
    """
    total = queries.shape[2]
    mask = None
    if 0 < window < total:
        mask = torch.ones(total, total, dtype=torch.bool, device=queries.device).tril().triu(1 - window)
    # Repeated, not enable_gqa: that takes a path on the CPU that holds all T x T scores.
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=1.0
    )


class _FullView(StepView):
    """A view without rows: new tokens attend to each other, nothing is kept, and the global layers are recorded.

    Args:
        shape: The model's sizes.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__([])
        self._shape = shape
        self.queries: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self._shape.layers

    def window(self, layer: int) -> int:
        """Return the tokens that a query of a layer sees; 0 if it sees all."""
        return self._shape.window(layer)

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend as the full cache would, and record a global layer."""
        del mask
        scaled = new.query * new.scaling
        output = full_attention(scaled, new.keys, new.values, self.window(layer))
        if self.window(layer):
            return output
        # Nothing before the first of them is differentiated by: neither parameters nor embeddings require gradients.
        if not output.requires_grad:
            output.requires_grad_()
        for kept, tensor in ((self.queries, scaled), (self.keys, new.keys), (self.values, new.values)):
            kept.append(_half(tensor.detach()[0]))
        self.outputs.append(output)
        return output


def _draw(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw a token at each position: where the cumulated probabilities ``[T, vocabulary]`` pass the numbers ``[T]``."""
    drawn = []
    for part, wanted in zip(torch.split(logits, _MOST_DRAWN), torch.split(numbers, _MOST_DRAWN), strict=True):
        cumulated = part.softmax(dim=-1).cumsum(dim=-1)
        # Scaled, as sums of rounded numbers do not end at exactly 1.
        drawn.append(torch.searchsorted(cumulated, wanted.unsqueeze(1) * cumulated[:, -1:], right=True).squeeze(1))
    return torch.cat(drawn).clamp_max(logits.shape[1] - 1)


def _half(tensor: torch.Tensor) -> torch.Tensor:
    """Return it in 16 bits on the host."""
    return tensor.to("cpu", tensor.dtype if tensor.dtype in _HALVES else torch.float16)
