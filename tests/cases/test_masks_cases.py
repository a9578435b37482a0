"""Masks whose structure somebody lost on the way."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks
from flexmod.testing import visible

HALF, STEP = 12, 4  # tokens of the noisy half, tokens of a diffusion block


def diffusion(b, h, i, j):
    noisy_i, noisy_j = i < HALF, j < HALF
    block_i, block_j = (i % HALF) // STEP, (j % HALF) // STEP
    own = noisy_i & noisy_j & (block_i == block_j)
    earlier = noisy_i & ~noisy_j & (block_j < block_i)
    clean = ~noisy_i & ~noisy_j & (block_j <= block_i)
    return own | earlier | clean


def _diffusion_by_hand(i: int, j: int) -> bool:
    block_i, block_j = i % HALF // STEP, j % HALF // STEP
    if i < HALF:
        return block_i == block_j if j < HALF else block_j < block_i
    return j >= HALF and block_j <= block_i


def test_P020_dense_is_tokens_and_tiles_are_tiles(lane, check, tiles_are_exact):
    block_mask = flexmod.create_block_mask(
        diffusion, None, None, 24, 24, device=lane.device, BLOCK_SIZE=8
    )
    by_hand = [[_diffusion_by_hand(i, j) for j in range(24)] for i in range(24)]
    assert block_mask.dense().dtype == torch.bool
    assert block_mask.dense().tolist() == [[by_hand]]
    tiles_are_exact(block_mask)
    check(lane, *lane.qkv((1, 1, 24, 16)), None, diffusion, tile=8)


# Kept keys [low, high) of each of 16 queries over 80 keys, five tiles of 16.
LOW = [0, 17, 18, 19, 33, 34, 47, 48, 49, 50, 20, 30, 5, 66, 16, 31]
HIGH = [80, 19, 62, 40, 34, 47, 48, 64, 63, 50, 21, 50, 75, 79, 64, 49]
INTERVALS = {
    # Most edges lie inside the three inner tiles; query 9 keeps nothing.
    "edges": (LOW, HIGH),
    # Keys 10..59 are hidden from all but query 5, which sees 35: no corner of a tile tells.
    "hole": ([0, 60, 3, 62, 0, 35, 1, 64, 0, 60, 9, 79, 2, 63, 0, 61],
             [10, 80, 9, 80, 1, 36, 10, 80, 2, 61, 10, 80, 7, 70, 10, 80]),
}  # fmt: skip


def _intervals(lane, name):
    low, high = (lane.tensor(table) for table in INTERVALS[name])
    return lambda b, h, i, j: (low[i] <= j) & (j < high[i])


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("tile", [16, None])
def test_P022_holes_in_inner_tiles(lane, check, tile, name):
    q, k, v = lane.qkv((1, 2, 16, 16), (1, 2, 80, 16))
    check(lane, q, k, v, None, _intervals(lane, name), tile=tile)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("tile", [16, (4, 8), (1, 1)])
def test_P022_only_a_full_tile_is_called_full(engine, tiles_are_exact, tile, name):
    mask_mod = _intervals(engine, name)
    block_mask = flexmod.create_block_mask(
        mask_mod, None, None, 16, 80, device=engine.device, BLOCK_SIZE=tile
    )
    assert torch.equal(block_mask.dense(), visible(mask_mod, 1, 1, 16, 80, engine.device))
    tiles_are_exact(block_mask)


WINDOWS = {
    "4 keys": (masks.sliding_window(4), [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
    "4 keys and the query's own": (masks.window_between(4, 0), [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]),
    "1 key": (masks.sliding_window(1), [1] * 10),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_P025_keys_of_a_window(lane, check, name):
    window, keys = WINDOWS[name]
    block_mask = flexmod.create_block_mask(
        window, None, None, 10, 10, device=lane.device, BLOCK_SIZE=4
    )
    assert block_mask.dense()[0, 0].sum(-1).tolist() == keys
    assert flexmod.create_mask(window, 1, 1, 10, 10)[0, 0].sum(-1).tolist() == keys
    q, k, v = lane.qkv((1, 1, 10, 16))
    _, lse = check(lane, q * 0, k, v, None, window, tile=4)
    # All scores are 0, so the lse counts the keys.
    assert lse.exp().round().long()[0, 0].tolist() == keys


@pytest.mark.parametrize("tile", [16, 128])
def test_P032_frames_and_blocks(lane, check, tile):
    frame, block = 24, 6

    def mask_mod(b, h, i, j):
        return (i % frame < block) | (j % frame < block) | (i // block == j // block)

    check(lane, *lane.qkv((1, 2, 48, 24)), None, mask_mod, tile=tile)
    assert torch.equal(
        visible(mask_mod, 1, 1, 48, 48), visible(masks.frame_block(frame, block), 1, 1, 48, 48)
    )
