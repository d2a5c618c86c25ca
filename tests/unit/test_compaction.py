"""Both ways of moving slots to the front, against indexing a copy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.compaction import move_gathered, move_stretches

HEADS, SLOTS = 3, 40
SHAPES = {torch.float32: (64,), torch.bfloat16: (4,), torch.uint8: (5,), torch.int32: (), torch.bool: (0,)}


@pytest.mark.parametrize("move", [move_gathered, move_stretches])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(kept=st.integers(0, SLOTS), seed=st.integers(0, 99))
def test_each_heads_own_slots_come_to_the_front_in_their_order(move, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(SLOTS, generator=generator)[:kept].sort().values for _ in range(HEADS)])
    # Rows of a larger tensor, as a pool's are.
    held = [
        torch.randint(100, (2, HEADS, SLOTS, *shape), generator=generator).to(dtype) for dtype, shape in SHAPES.items()
    ]
    before = [tensor.clone() for tensor in held]
    move([tensor[1] for tensor in held], slots)
    for tensor, old in zip(held, before, strict=True):
        for head in range(HEADS):
            assert torch.equal(tensor[1, head, :kept], old[1, head, slots[head]])
        assert torch.equal(tensor[0], old[0]), "the other row stays"
