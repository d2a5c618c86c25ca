"""Which layers of a model attend within a sliding window, as its configuration says."""

from transformers import PretrainedConfig

from scissorhands.errors import UnsupportedModelError

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def layer_windows(config: PretrainedConfig, subject: str) -> tuple[int, ...]:
    """Return W of each layer: the tokens that a query sees, its own included; 0 for a layer that sees all.

    Args:
        config: The configuration of the decoder.
        subject: Whom errors are about.

    Returns:
        One number a layer, or nothing when all layers see all tokens.

    Raises:
        UnsupportedModelError: A layer is of another kind, or the configuration does not say how wide its window is.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None and hasattr(config, "attention_layers"):
        # GPT-Neo has its own names, and gives its local layers a mask of their own that nobody is told of.
        kinds = [_FULL if kind == "global" else kind for kind in config.attention_layers]
    if kinds is None:
        # Where a configuration lists no kinds, a window that is set is used by every layer.
        slides = bool(window) and getattr(config, "use_sliding_window", True)
        kinds = [_SLIDING] * config.num_hidden_layers if slides else []
    others = sorted(set(kinds) - {_FULL, _SLIDING})
    if others:
        raise UnsupportedModelError(
            f"{subject} has layers of type {', '.join(others)}; only full and sliding attention are served"
        )
    if _SLIDING not in kinds:
        return ()
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModelError(
            f"{subject} has sliding layers but does not say its sliding_window (got {window!r})"
        )
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)
