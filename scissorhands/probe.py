"""The probe: finds out at start-up whether a model's attention really is computed by us, and rightly."""

import inspect
import math
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.errors import UnsupportedModelError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_windows import layer_windows
from scissorhands.new_tokens import NewTokens
from scissorhands.row import Row
from scissorhands.view import StepView

# Tokens whose logits are compared.
PROBE_TOKENS = 8
# Most tokens before those: a window below this is left behind, so that one that is served wrongly shows.
MOST_BEFORE = 1024
# Largest difference of logits from transformers' own attention, relative to their spread.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_TOLERANCE = 5e-2

_PROBED: WeakSet[PreTrainedModel] = WeakSet()


class _CountingView(StepView):
    """A view that counts how often each layer attends."""

    def __init__(self, rows: list[Row], layers: int) -> None:
        super().__init__(rows)
        self.calls = [0] * layers

    def window(self, layer: int) -> int:
        """Return a layer's window, if there is such a layer."""
        if layer >= len(self.calls):
            raise UnsupportedModelError(f"layer {layer} attends, but the configuration has {len(self.calls)} layers")
        return super().window(layer)

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Count, then attend."""
        self.calls[layer] += 1
        return super().attend(layer, new, mask)


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Read the sizes of a model's cache from its configuration.

    Raises:
        UnsupportedModelError: The configuration does not tell, or names layers that are not served.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        query_heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
        return ModelShape(
            layers=int(config.num_hidden_layers),
            kv_heads=kv_heads,
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // query_heads),
            element_bytes=model.dtype.itemsize,
            group=query_heads // kv_heads,
            layer_windows=layer_windows(config, type(model).__name__),
        )
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(model).__name__}: the configuration lacks {error.name}") from error


@torch.inference_mode()
def probe(model: PreTrainedModel) -> None:
    """Switch a model to our attention, and make sure of it with two forward passes: a prompt, and one token more.

    Each layer must call us once, and the logits must be those of transformers' own attention: a model that bypasses the
    attention interface, or adds a bias that we are not told of, fails here instead of answering wrongly. The prompt is
    longer than the model's sliding window if that is at most ``MOST_BEFORE`` tokens wide; a wider one is only compared
    with what the model tells its attention. A model that has passed and still attends by us is not probed again.

    Raises:
        UnsupportedModelError: The model would not be served rightly, with the reason.
    """
    shape = model_shape(model)
    before = model.config._attn_implementation  # noqa: SLF001 - transformers has no public getter
    if before == NAME and model in _PROBED:
        return
    ids = _ids(model, shape)
    model.set_attn_implementation("eager")
    expected = _logits(model, ids, use_cache=False)
    model.set_attn_implementation(NAME)
    try:
        reason = _difference(model, shape, ids, expected)
    except (RuntimeError, LookupError, TypeError, ValueError, UnsupportedModelError) as error:
        # What a model does with a cache or a mask that it does not expect is not ours to foresee.
        reason = str(error) or type(error).__name__
    if reason:
        model.set_attn_implementation(before)
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {reason}")
    _PROBED.add(model)


def _ids(model: PreTrainedModel, shape: ModelShape) -> torch.Tensor:
    """Return ``[1, tokens]`` ids that leave as wide a window behind as they can."""
    config = model.config.get_text_config(decoder=True)
    most = min(MOST_BEFORE, (getattr(config, "max_position_embeddings", None) or MOST_BEFORE) - PROBE_TOKENS)
    before = max((window for window in shape.layer_windows if window <= most), default=0)
    ids: torch.Tensor = torch.arange(before + PROBE_TOKENS, device=model.device).unsqueeze(0) % config.vocab_size
    return ids


def _logits(model: PreTrainedModel, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return the logits of at most the last ``PROBE_TOKENS`` of the ids; all of them may be too many to hold."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = min(PROBE_TOKENS, ids.shape[1])
    logits: torch.Tensor = model(input_ids=ids, **arguments).logits[:, -PROBE_TOKENS:].float()
    return logits


def _difference(model: PreTrainedModel, shape: ModelShape, ids: torch.Tensor, expected: torch.Tensor) -> str:
    """Run the model over our cache; return what is not as it should be, or nothing."""
    resident = ResidentCache(shape, model.dtype, model.device)
    total = ids.shape[1]
    row = resident.add_row(grant(BudgetRequest.tokens(total), PolicyRequest("full"), shape, total))
    found = []
    for part in (ids[:, :-1], ids[:, -1:]):
        view = _CountingView([row], shape.layers)
        positions = torch.arange(row.step, row.step + part.shape[1], device=model.device).unsqueeze(0)
        found.append(_logits(model, part, position_ids=positions, cache=view, use_cache=True))
        if view.calls != [1] * shape.layers:
            return f"not every layer attends through transformers' AttentionInterface; calls per layer: {view.calls}"
        view.commit(part.shape[1])
    logits = torch.cat(found, dim=1)[:, -PROBE_TOKENS:]
    difference = float((logits - expected).abs().max() / expected.std().clamp_min(1e-6))
    if math.isnan(difference) or difference > TOLERANCE.get(model.dtype, HALF_TOLERANCE):
        return f"its logits differ from transformers' own attention by {difference:.2g} standard deviations"
    return ""
