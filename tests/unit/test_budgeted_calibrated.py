"""The cache inside a transformers program, with what was calibrated of the model."""

import pytest
import torch
from support.codec_data import statistics
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import HALF_BYTES, BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.calibrated import Calibrated
from scissorhands.errors import InvalidRequestError
from scissorhands.probe import model_shape
from scissorhands.profile import KEY_BITS, VALUE_BITS, Profile

LENGTH, NEW = 60, 40
SHARES = (0.1, 0.3, 0.6)


@pytest.fixture
def model():
    return tiny_model("llama_grouped")


@pytest.fixture
def calibrated(model):
    """Return a profile by which the first heads of the first layers need the most slots, and bits cost little."""
    shape = model_shape(model)
    losses = tuple(
        tuple(tuple(10.0 ** (-layer - head) * (1 - share) for share in SHARES) for head in range(shape.kv_heads))
        for layer in range(shape.layers)
    )
    bits = tuple(tuple(tuple(1e-3 / 4**width for width in (*KEY_BITS, *VALUE_BITS)) for _ in layer) for layer in losses)
    return Calibrated(Profile("", SHARES, losses, bits), statistics(shape.head_dim, shape.layers * shape.kv_heads))


def test_heads_share_slots_and_bits_within_the_compression(model, calibrated):
    ids = torch.stack([random_tokens(LENGTH, seed=row) for row in range(2)])
    cache = BudgetedCache(
        model, BudgetRequest.compression(4), total_tokens=LENGTH + NEW, codec="planned", calibrated=calibrated
    )
    model.generate(ids, cache=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    shape = model_shape(model)
    full = (LENGTH + NEW) * 2 * shape.layers * shape.kv_heads * shape.head_dim * HALF_BYTES
    assert cache.evicted_slots > 0
    assert len(set(cache.grant.layer_slots)) > 1
    assert cache.allocated_bytes() == 2 * cache.grant.bytes <= 2 * full / 4


def test_calibrated_formats_need_what_was_calibrated(model):
    cache = BudgetedCache(model, BudgetRequest.tokens(32), codec="klt:k4v4")
    with pytest.raises(InvalidRequestError, match="run scissorhands calibrate"):
        model.generate(random_tokens(8, seed=0).unsqueeze(0), cache=cache, max_new_tokens=1, pad_token_id=0)
    with pytest.raises(InvalidRequestError, match="profile"):
        BudgetedCache(model, BudgetRequest.compression(4), total_tokens=100, codec="planned")
