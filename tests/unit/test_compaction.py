"""Both ways of parting slots, against indexing a copy."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.compaction import part_on_device, part_on_host

HEADS, SLOTS = 3, 40
SHAPES = {torch.float32: (64,), torch.bfloat16: (4,), torch.uint8: (5,), torch.int32: (), torch.bool: (0,)}


@dataclass
class Layer:
    """A layer of two rows, of which the second is parted, and what it was before."""

    keep: np.ndarray
    length: int
    held: list[torch.Tensor]
    before: list[torch.Tensor]


def layer(slots: int, decided: int, newer: int, dropped: int, generator: torch.Generator) -> Layer:
    keep = np.ones((HEADS, decided), dtype=bool)
    for own in keep:
        own[torch.randperm(decided, generator=generator)[:dropped].numpy()] = False
    # Rows of a larger tensor, as a pool's are.
    held = [
        torch.randint(1, 100, (2, HEADS, slots, *shape), generator=generator).to(dtype)
        for dtype, shape in SHAPES.items()
    ]
    return Layer(keep, min(decided + newer, slots), held, [tensor.clone() for tensor in held])


@pytest.mark.parametrize("part", [part_on_host, part_on_device])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, SLOTS), st.integers(0, 5)), min_size=1, max_size=3),
    dropped=st.integers(0, SLOTS),
    taken=st.integers(1, len(SHAPES)),
    cleared=st.integers(0, len(SHAPES)),
    seed=st.integers(0, 99),
)
def test_what_a_head_keeps_comes_to_the_front_in_its_order_and_the_rest_is_taken(
    part, sizes, dropped, taken, cleared, seed
):
    generator = torch.Generator().manual_seed(seed)
    dropped = min(dropped, *(decided for decided, _ in sizes), SLOTS)
    layers = [layer(SLOTS + extra, *size, dropped, generator) for extra, size in enumerate(sizes)]
    shares = [[tensor[1] for tensor in each.held] for each in layers]
    found = part(shares, [each.keep for each in layers], [each.length for each in layers], taken, cleared)
    assert [len(own) for own in found] == [taken] * len(layers)
    for each, own_found in zip(layers, found, strict=True):
        for index, (tensor, old) in enumerate(zip(each.held, each.before, strict=True)):
            for head, own in enumerate(each.keep):
                staying = np.concatenate([np.flatnonzero(own), np.arange(len(own), each.length)])
                assert torch.equal(tensor[1, head, : len(staying)], old[1, head, staying])
                assert torch.equal(tensor[1, head, each.length :], old[1, head, each.length :])
                if index >= cleared:
                    assert not tensor[1, head, len(staying) : each.length].any()
                if index < taken:
                    assert torch.equal(own_found[index][head], old[1, head, np.flatnonzero(~own)])
            assert torch.equal(tensor[0], old[0]), "the other row stays"


def test_heads_that_drop_different_numbers_are_refused():
    held = [torch.arange(8, dtype=torch.float32).view(2, 4)]
    with pytest.raises(ValueError, match="different numbers"):
        part_on_host([held], [np.array([[True, False, True, True], [True] * 4])], [4], taken=1, cleared=1)
