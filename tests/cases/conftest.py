"""What the case tests share: one call compared with the oracle, and counts of compiles."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod.testing import assert_matches, naive, naive_same_dtype


@pytest.fixture
def check():
    """`check(lane, q, k, v, score_mod, mask_mod, tile=...)`: out and lse are the oracle's."""
    return _check


def _check(
    lane, query, key, value, score_mod=None, mask_mod=None, *, tile=None, batches=None, heads=None,
    scale=None,
):  # fmt: skip
    block_mask = mask_mod
    if tile is not None:
        lengths = query.shape[2], key.shape[2]
        block_mask = flexmod.create_block_mask(
            mask_mod, batches, heads, *lengths, device=lane.device, BLOCK_SIZE=tile
        )
    out, lse = flexmod.flex_attention(
        query, key, value, score_mod, block_mask, scale=scale, return_lse=True,
        enable_gqa=query.shape[1] != key.shape[1], backend=lane.backend,
    )  # fmt: skip
    assert out.dtype == query.dtype
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    inputs = query, key, value, score_mod, mask_mod, scale
    expected, expected_lse, _ = naive(*inputs)
    half = query.dtype in (torch.float16, torch.bfloat16)
    assert_matches(out, expected, naive_same_dtype(*inputs)[0] if half else None)
    assert_matches(lse, expected_lse)
    return out, lse


@pytest.fixture
def compiles():
    """`compiles()`: how many kernels this process has compiled so far."""
    return lambda: int(flexmod.cache.stats().compiles)


@pytest.fixture
def tiles_are_exact():
    """`tiles_are_exact(block_mask)`: each tile says what its tokens say."""
    return _tiles_are_exact


def _tiles_are_exact(block_mask) -> None:
    dense, tiles = block_mask.dense(), block_mask.tiles()
    rows, columns = block_mask.block_size
    q_len, kv_len = dense.shape[2:]
    for at in torch.cartesian_prod(*(torch.arange(n) for n in tiles.shape)).tolist():
        batch, head, i, j = at
        part = dense[batch, head, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        whole = (i + 1) * rows <= q_len and (j + 1) * columns <= kv_len
        state = 0 if not part.any() else 2 if part.all() and whole else 1
        told = int(tiles[batch, head, i, j])
        assert told == state, f"tile {at} is {told}, its tokens say {state}"
