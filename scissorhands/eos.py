"""Which tokens end an answer."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every id that ends an answer: the generation configuration's, else the model's, else the tokenizer's."""
    for source in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, (list, tuple)) else [found])
    return frozenset()
