"""What the oracle tests share: rules that evict dozens of times, and how the cache and the reference are compared."""

import torch
from support.dense_reference import DenseSequence, Rules
from support.engine_path import kept_positions
from transformers import PreTrainedModel

from scissorhands.budgeted import BudgetedCache
from scissorhands.row import Row

TOLERANCE = 1e-4
RULES = {
    "default": Rules("default", B=40, r=12, s=4, m=6, L=3, c=10),
    "counts": Rules("counts", B=40, r=12, s=4, m=6, L=3, c=10, w=32),
    # The paper's numbers for a budget of 26; the paper knows no chunks, so that number is ours.
    "paper": Rules("paper", B=26, r=10, s=0, m=13, L=0, c=3, w=400),
    "h2o": Rules("h2o", B=36, r=18, s=2, m=5, L=5, c=9),
    "tova": Rules("tova", B=34, r=3, s=2, m=5, L=4, c=7),
    "snapkv": Rules("snapkv", B=44, r=12, s=4, m=6, L=5, c=10, w=16),
    "r-kv": Rules("r-kv", B=44, r=8, s=4, m=8, L=5, c=10, w=16),
    "fastgen": Rules("fastgen", B=40, r=4, s=3, m=6, L=3, c=10),
    "expected-attention": Rules("expected-attention", B=40, r=6, s=4, m=5, L=4, c=9),
    "protected": Rules("protected:h2o", B=44, r=9, s=4, m=5, L=5, c=9, t=7),
    "merged": Rules("merged:default", B=40, r=12, s=4, m=6, L=3, c=10),
    "streaming": Rules("streaming", B=32, r=0, s=4, m=4, L=2, c=8),
}


@torch.inference_mode()
def forward(model: PreTrainedModel, cache: BudgetedCache, tokens: torch.Tensor) -> torch.Tensor:
    """Run tokens of one sequence through the model in one pass; return ``[tokens, vocabulary]`` logits."""
    logits: torch.Tensor = model(input_ids=tokens.unsqueeze(0), cache=cache, use_cache=True).logits[0]
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits, keys or values."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def assert_kept(row: Row, reference: DenseSequence) -> None:
    """Compare the positions of the tokens kept, of each layer and head."""
    # A comparison that rounding could turn would be no error of the cache, but with these seeds there is none.
    assert kept_positions(row) == reference.kept(), (
        f"kept sets differ at step {reference.step}; {reference.close_calls} close calls"
    )
