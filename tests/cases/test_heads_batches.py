"""Which batch and which head a mod sees, and which keys they read."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod.errors import ArgumentError, BlockMaskError
from flexmod.testing import assert_matches, naive


def _counted(lane):
    counters = lane.tensor([3, 150])
    return lambda b, h, i, j: j <= counters[b]


def test_P014_a_map_for_each_batch(lane, check):
    q, k, v = lane.qkv((2, 1, 64, 16), (2, 1, 256, 16))
    check(lane, q, k, v, None, _counted(lane), tile=64, batches=2)
    check(lane, q, k, v, None, _counted(lane))


@pytest.mark.parametrize("axis", ["b", "h"])
def test_P014_a_broadcast_axis_that_is_read_is_refused(engine, axis):
    q, k, v = engine.qkv((2, 2, 64, 16), (2, 2, 256, 16))
    counters = engine.tensor([3, 150])

    def mask_mod(b, h, i, j):
        return j <= counters[b if axis == "b" else h]

    with pytest.raises(ArgumentError, match=rf"\b{axis}\b"):
        block_mask = flexmod.create_block_mask(
            mask_mod, 1, 1, 64, 256, device=engine.device, BLOCK_SIZE=64
        )
        flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=engine.backend)


def test_P014_what_a_table_says_of_an_axis_is_inferred(lane):
    q, k, v = lane.qkv((2, 3, 64, 16), (2, 3, 256, 16))
    counters = lane.tensor([[3, 150, 8], [0, 256, 9]])

    def mask_mod(b, h, i, j):
        return (j <= counters[b, h]) & (h >= 0)

    block_mask = flexmod.create_block_mask(
        mask_mod, None, None, 64, 256, device=lane.device, BLOCK_SIZE=64
    )
    assert block_mask.shape == (2, 3, 64, 256)
    out = flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=lane.backend)
    assert_matches(out, naive(q, k, v, mask_mod=mask_mod)[0])
    assert flexmod.create_mask(mask_mod, None, None, 4, 4, lane.device).shape == (2, 3, 4, 4)


def test_P014_an_axis_that_no_table_or_two_tables_tell_is_refused(engine):
    two, three = engine.tensor([1, 2]), engine.tensor([1, 2, 3])
    for mask_mod, text in (
        (lambda b, h, i, j: i + b > j, "reads b but B is None: give B"),
        (lambda b, h, i, j: two[b + 1] > j, "reads b but B is None: give B"),
        (lambda b, h, i, j: two[h] + three[h] > j, r"H is None, and indexes axes of \[2, 3\]"),
    ):
        for make in (flexmod.create_block_mask, flexmod.create_mask):
            with pytest.raises(BlockMaskError, match=text):
                make(mask_mod, None, None, 8, 8, engine.device)


def test_P014_an_axis_that_is_not_read_is_broadcast(lane, check):
    q, k, v = lane.qkv((2, 2, 20, 16))
    check(lane, q, k, v, None, lambda b, h, i, j: i >= j, tile=16)


def _causal_below(cut_offs):
    return lambda b, h, i, j: (i >= cut_offs[b]) | (i >= j)


@pytest.mark.parametrize("tile", [None, 16])
def test_P016_a_smaller_batch_next(lane, check, compiles, tile):
    q, k, v = lane.qkv((3, 1, 8, 16))
    first = _causal_below(lane.tensor([3, 0, 8]))
    before = compiles()
    out, _ = check(lane, q, k, v, None, first, tile=tile, batches=3)
    compiled = compiles()
    assert_matches(out[1], naive(q, k, v)[0][1])
    assert_matches(out[2], naive(q, k, v, mask_mod=lambda b, h, i, j: i >= j)[0][2])
    second = _causal_below(lane.tensor([5, 1]))
    check(lane, q[:2], k[:2], v[:2], None, second, tile=tile, batches=2)
    assert compiled - before <= 1 and compiles() == compiled


GROUPS = [(2, 6, 1), (2, 3, 1), (1, 5, 1), (1, 7, 1), (2, 3, 5)]


@pytest.mark.parametrize("kv_heads,group,q_len", GROUPS)
def test_P044_groups_of_any_size(lane, check, kv_heads, group, q_len):
    check(lane, *lane.qkv((2, kv_heads * group, q_len, 16), (2, kv_heads, 48, 16)))


@pytest.mark.parametrize("tile", [None, 16])
def test_P046_h_is_the_query_head(lane, check, tile):
    bias = lane.floats([0.5, -0.25, 1.0, -1.5, 0.125, 2.0])
    keep = lane.tensor([20, 3, 7, 11, 1, 16])

    def score_mod(s, b, h, i, j):
        return s + bias[h] * j

    def mask_mod(b, h, i, j):
        return j < keep[h]

    q, k, v = lane.qkv((1, 6, 20, 16), (1, 2, 20, 16))
    check(lane, q, k, v, score_mod)
    check(lane, q, k, v, score_mod, mask_mod, tile=tile, heads=6)


def test_P047_one_batch_of_keys_for_three_of_queries(lane, check):
    bias = lane.floats([0.5, -0.25, 1.0])

    def score_mod(s, b, h, i, j):
        return s + bias[b] * j

    q, k, v = lane.qkv((3, 2, 8, 16), (1, 2, 12, 16))
    out, _ = check(lane, q, k, v, score_mod)
    wide, _ = check(lane, q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), score_mod)
    assert torch.equal(out, wide)
    check(lane, q, k, v, score_mod, lambda b, h, i, j: j % 3 != b, tile=16, batches=3)


def test_P047_other_batches_are_refused(engine):
    q, k, v = engine.qkv((3, 2, 8, 16), (2, 2, 12, 16))
    with pytest.raises(ArgumentError):
        flexmod.flex_attention(q, k, v, backend=engine.backend)
