"""Both ways of parting slots, against indexing a copy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.compaction import part_on_device, part_on_host

HEADS, SLOTS = 3, 40
SHAPES = {torch.float32: (64,), torch.bfloat16: (4,), torch.uint8: (5,), torch.int32: (), torch.bool: (0,)}


@pytest.mark.parametrize("part", [part_on_host, part_on_device])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    decided=st.integers(0, SLOTS),
    kept=st.integers(0, SLOTS),
    newer=st.integers(0, 5),
    taken=st.integers(1, len(SHAPES)),
    seed=st.integers(0, 99),
)
def test_what_a_head_keeps_comes_to_the_front_in_its_order_and_the_rest_is_taken(
    part, decided, kept, newer, taken, seed
):
    generator = torch.Generator().manual_seed(seed)
    kept, length = min(kept, decided), min(decided + newer, SLOTS)
    keep = np.zeros((HEADS, decided), dtype=bool)
    for own in keep:
        own[torch.randperm(decided, generator=generator)[:kept].numpy()] = True
    # Rows of a larger tensor, as a pool's are.
    held = [
        torch.randint(100, (2, HEADS, SLOTS, *shape), generator=generator).to(dtype) for dtype, shape in SHAPES.items()
    ]
    before = [tensor.clone() for tensor in held]
    found = part([tensor[1] for tensor in held], keep, length, taken)
    assert len(found) == taken
    for index, (tensor, old) in enumerate(zip(held, before, strict=True)):
        for head, own in enumerate(keep):
            staying = np.concatenate([np.flatnonzero(own), np.arange(decided, length)])
            assert torch.equal(tensor[1, head, : len(staying)], old[1, head, staying])
            assert torch.equal(tensor[1, head, length:], old[1, head, length:])
            if index < taken:
                assert torch.equal(found[index][head], old[1, head, np.flatnonzero(~own)])
        assert torch.equal(tensor[0], old[0]), "the other row stays"
