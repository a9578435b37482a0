"""What share of all pairs a mask shows, estimated."""

import pytest
import torch

import flexmod
from flexmod import masks
from flexmod.program.sample import visible_share

SIZES = (2, 4, 3000, 5000)  # batch, heads, queries, keys
MASKS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(300),
    "prefix": masks.prefix_lm(1000),
    "dilated": lambda b, h, q, kv: (q - kv) % 4 == 0,
    "by head": lambda b, h, q, kv: h > 0,
    "by batch": lambda b, h, q, kv: (b == 1) & (kv < 100),
    "nothing": lambda b, h, q, kv: q < 0,
    "everything": lambda b, h, q, kv: kv >= 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_the_share_is_near_the_true_one(name):
    program = flexmod.trace(MASKS[name], "mask")
    exact = flexmod.create_block_mask(MASKS[name], *SIZES, BLOCK_SIZE=100).dense().double().mean()
    assert visible_share(program, *SIZES) == pytest.approx(exact.item(), abs=0.02)


def test_masks_that_read_tensors_are_not_evaluated():
    ids = torch.zeros(5000, dtype=torch.int32)
    assert visible_share(flexmod.trace(masks.document(ids), "mask"), *SIZES) is None
