"""The attention function: appends new keys and values, attends over the resident slots, and gathers evidence.

Registered with transformers as the attention implementation ``scissorhands``. ``generate`` and several models pass
nothing to ``Cache.update`` that would tell what the attention function needs, so ``update`` tags the new keys with
their view and layer, and the appending happens here.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from scissorhands import kernels
from scissorhands.errors import UnsupportedModelError
from scissorhands.layer_pool import LayerPool
from scissorhands.new_tokens import NewTokens
from scissorhands.span import Span

NAME = "scissorhands"
_TAG = "_scissorhands_tag"
# On the mask of a layer that attends within a window: W and the padding. Some models tell so by the mask alone.
_LOCAL = "_scissorhands_local"

# Arguments that transformers passes along and that do not change what attention computes here.
_HARMLESS = frozenset(
    {
        "cache_position", "position_ids", "position_embeddings", "output_attentions", "output_hidden_states",
        "use_cache", "is_causal", "layer_idx", "num_items_in_batch", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k",
        "max_length_q", "max_length_k", "logits_to_keep", "kwargs", "token_type_ids", "output_router_logits",
    }
)  # fmt: skip


# What some arguments that we do not compute are, in words.
_MEANINGS = {"s_aux": "attention sinks (s_aux)", "softcap": "soft-capped scores (softcap)"}


class View(Protocol):
    """What a forward pass sees of the cache."""

    def window(self, layer: int) -> int:
        """Return the tokens that a query of a layer sees; 0 if it sees all that are kept."""

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Append and attend in one layer.

        Args:
            layer: The layer.
            new: The new tokens of the batch. The view knows their kinds.
            mask: ``[batch, tokens]``, which of the tokens are no padding; None when none is.

        Returns:
            ``[batch, query_heads, a, head_dim]``.
        """


def tag(keys: torch.Tensor, view: View, layer: int) -> torch.Tensor:
    """Return a new handle on ``keys`` that carries its view and layer to the attention function."""
    tagged = keys.view(keys.shape) if keys.is_contiguous() else keys.clone()
    setattr(tagged, _TAG, (view, layer))
    return tagged


@torch.no_grad()  # The pool outlives the pass, and would keep all passes' graphs alive.
def attend(pool: LayerPool, span: Span, new: NewTokens, *, observe: bool) -> torch.Tensor:
    """Append ``a`` tokens to each row of a span, attend to what the layer holds, and gather evidence.

    Args:
        pool: The layer's slots.
        span: The rows and where their new tokens go.
        new: The new tokens.
        observe: Whether the evidence should count these queries; False if it already does.

    Returns:
        ``[R, query_heads, a, head_dim]``.
    """
    if kernels.fits(pool, new):
        return kernels.attend(pool, span, new, observe=observe)
    attended = pool.append(span, new.keys, new.values, fresh=observe)
    rows, query_heads, incoming, head_dim = new.query.shape
    kv_heads = new.keys.shape[1]
    group = query_heads // kv_heads
    visible, extent = attended.visible, attended.extent
    # The heads of a group share their keys, so they are folded into the queries instead of repeating the keys.
    folded = new.query.reshape(rows, kv_heads, group * incoming, head_dim)
    scores = (attended.scores(folded) * new.scaling).view(rows, kv_heads, group, incoming, extent)
    pool.weigh(span, scores)
    if visible is not None:
        scores.masked_fill_(~visible.unsqueeze(1), float("-inf"))
    probabilities = torch.softmax(scores, dim=-1)
    if observe and not pool.window:
        pool.observe(span, probabilities, scores, new.kinds)
    weights = probabilities.view(rows, kv_heads, group * incoming, extent)
    return attended.weighted(weights).view(rows, query_heads, incoming, head_dim)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; see ``transformers.AttentionInterface``.

    Raises:
        UnsupportedModelError: The keys do not come from our cache, or the model asks for something we do not compute.
    """
    tagged = getattr(key, _TAG, None)
    if tagged is None:
        raise UnsupportedModelError(
            "attention implementation 'scissorhands' was called without a scissorhands cache: pass one to generate(), "
            "or choose another implementation with model.set_attn_implementation()"
        )
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown or dropout:
        asked = ", ".join([_MEANINGS.get(name, name) for name in unknown] + (["dropout"] if dropout else []))
        raise UnsupportedModelError(f"{type(module).__name__} asks attention for what is not supported: {asked}")
    view, layer = tagged
    mask = _within_window(module, view.window(layer), attention_mask, sliding_window)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: torch.Tensor = view.attend(layer, NewTokens(query, key, value, factor), mask)
    return output.transpose(1, 2).contiguous(), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: object,
) -> torch.Tensor | None:
    """Return the 2-D padding mask; causality and windows are ours to keep (``transformers.AttentionMaskInterface``).

    A mask for local attention (``local_size`` tokens) is wrapped, so that the attention function can make sure that the
    layer has that window: a model may make one that no layer of it uses.
    """
    del batch_size, q_length, kv_length, kwargs
    if local_size is None:
        return attention_mask
    local = torch.zeros(0)
    setattr(local, _LOCAL, (local_size, attention_mask))
    return local


def _within_window(
    module: torch.nn.Module, served: int, mask: torch.Tensor | None, sliding_window: int | None
) -> torch.Tensor | None:
    """Return a layer's padding mask, having made sure that its window is the one that is served.

    Raises:
        UnsupportedModelError: Mask, argument and configuration do not agree on the window.
    """
    asked, padding = getattr(mask, _LOCAL, (0, mask))
    if asked != served or sliding_window not in (None, served):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends within {asked or sliding_window or 'all'} tokens, "
            f"where the configuration says {served or 'all'}"
        )
    return padding


def register() -> None:
    """Make the attention implementation known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)


def adjacent_runs(places: Sequence[tuple[Hashable, int]]) -> list[tuple[int, int]]:
    """Split a batch into runs of adjacent rows that can be attended to together.

    Args:
        places: Of each batch entry, what a run has in common, such as its pool, and its row in the pool.

    Returns:
        Of each run, its first batch entry and the one after its last.
    """
    runs = []
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != (places[end - 1][0], places[end - 1][1] + 1):
            runs.append((start, end))
            start = end
    return runs


register()
