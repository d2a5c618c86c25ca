"""The probe: finds out at start-up whether a model's attention really is computed by us, and rightly."""

import math

import torch
from transformers import PreTrainedModel

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.cache import ResidentCache
from scissorhands.errors import UnsupportedModelError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.row import Row
from scissorhands.view import StepView

PROBE_TOKENS = 8
# Largest difference of logits from transformers' own attention, relative to their spread.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_TOLERANCE = 5e-2


class _CountingView(StepView):
    """A view that counts how often each layer attends."""

    def __init__(self, rows: list[Row], layers: int) -> None:
        super().__init__(rows)
        self.calls = [0] * layers

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """Count, then attend."""
        if layer >= len(self.calls):
            raise UnsupportedModelError(f"layer {layer} attends, but the configuration has {len(self.calls)} layers")
        self.calls[layer] += 1
        return super().attend(layer, query, keys, values, mask, scaling)


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Read the sizes of a model's cache from its configuration.

    Raises:
        UnsupportedModelError: The configuration does not tell.
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
        )
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(model).__name__}: the configuration lacks {error.name}") from error


@torch.inference_mode()
def probe(model: PreTrainedModel) -> None:
    """Switch a model to our attention, and make sure of it with a short forward pass.

    Each layer must call us once, and the logits must be those of transformers' own attention: a model that bypasses the
    attention interface, or adds a bias that we are not told of, fails here instead of answering wrongly.

    Raises:
        UnsupportedModelError: The model would not be served rightly, with the reason.
    """
    shape = model_shape(model)
    before = model.config._attn_implementation  # noqa: SLF001 - transformers has no public getter
    ids = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids, use_cache=False).logits.float()
    model.set_attn_implementation(NAME)
    try:
        reason = _difference(model, shape, ids, expected)
    except (RuntimeError, LookupError, TypeError, ValueError, UnsupportedModelError) as error:
        # What a model does with a cache or a mask that it does not expect is not ours to foresee.
        reason = str(error) or type(error).__name__
    if reason:
        model.set_attn_implementation(before)
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {reason}")


def _difference(model: PreTrainedModel, shape: ModelShape, ids: torch.Tensor, expected: torch.Tensor) -> str:
    """Run the model over our cache; return what is not as it should be, or nothing."""
    resident = ResidentCache(shape, model.dtype, model.device)
    row = resident.add_row(grant(BudgetRequest.tokens(PROBE_TOKENS), PolicyRequest("full"), shape, PROBE_TOKENS))
    view = _CountingView([row], shape.layers)
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    logits = model(input_ids=ids, position_ids=positions, cache=view, use_cache=True).logits.float()
    if view.calls != [1] * shape.layers:
        return f"not every layer attends through transformers' AttentionInterface; calls per layer: {view.calls}"
    difference = float((logits - expected).abs().max() / expected.std().clamp_min(1e-6))
    if math.isnan(difference) or difference > TOLERANCE.get(model.dtype, HALF_TOLERANCE):
        return f"its logits differ from transformers' own attention by {difference:.2g} standard deviations"
    return ""
