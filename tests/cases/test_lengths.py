"""Lengths that do not fit the tiles, the map or anything at all."""

from __future__ import annotations

import math

import pytest
import torch

import flexmod
from flexmod.errors import ArgumentError, IndexRangeError
from flexmod.testing import visible


def causal(b, h, i, j):
    return i >= j


def band(b, h, i, j):
    return (i - j).abs() < 40


def always(b, h, i, j):
    return j >= 0


@pytest.mark.parametrize("q_len,kv_len", [(70, 70), (33, 70), (64, 33)])
@pytest.mark.parametrize("mask_mod", [band, always])
def test_P001_short_last_tile(lane, check, mask_mod, q_len, kv_len):
    q, k, v = lane.qkv((1, 2, q_len, 16), (1, 2, kv_len, 16))
    check(lane, q, k, v, None, mask_mod, tile=32)


@pytest.mark.parametrize("mask_mod", [band, always])
def test_P001_short_last_tile_in_half_precision(half_lane, check, mask_mod):
    check(half_lane, *half_lane.qkv((1, 2, 70, 16)), None, mask_mod, tile=32)


def test_P001_a_cut_tile_is_not_full(tiles_are_exact):
    block_mask = flexmod.create_block_mask(always, None, None, 70, 70, device="cpu", BLOCK_SIZE=32)
    assert block_mask.tiles()[0, 0].tolist() == [[2, 2, 1], [2, 2, 1], [1, 1, 1]]
    tiles_are_exact(
        flexmod.create_block_mask(band, None, None, 70, 70, device="cpu", BLOCK_SIZE=32)
    )


class Spy:
    """A mask that remembers the largest index it was ever shown as a number."""

    def __init__(self, mask_mod):
        self.mask_mod, self.calls, self.largest = mask_mod, 0, -1

    def __call__(self, b, h, i, j):
        self.calls += 1
        for index in (i, j):
            if isinstance(index, (int, torch.Tensor)):
                self.largest = max(self.largest, int(torch.as_tensor(index).max()))
        return self.mask_mod(b, h, i, j)


def _kept_rows(lane):
    table = (torch.arange(46) % 3).to(lane.device)
    return lambda b, h, i, j: table[i] > 0, 46, 32


def _packed(lane):
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 7, 9])).to(lane.device)
    return lambda b, h, i, j: ids[i] == ids[j], 21, 16


@pytest.mark.parametrize("make", [_kept_rows, _packed])
def test_P002_tables_are_read_inside_the_length(lane, check, make):
    mask_mod, seqlen, tile = make(lane)
    spy = Spy(mask_mod)
    block_mask = flexmod.create_block_mask(
        spy, None, None, seqlen, seqlen, device=lane.device, BLOCK_SIZE=tile
    )
    assert spy.calls and spy.largest < seqlen
    assert torch.equal(block_mask.dense(), visible(mask_mod, 1, 1, seqlen, seqlen, lane.device))
    assert spy.largest < seqlen
    check(lane, *lane.qkv((1, 1, seqlen, 16)), None, mask_mod, tile=tile)


def test_P002_a_table_one_short_is_an_error(engine):
    table = torch.ones(45, dtype=torch.bool, device=engine.device)

    def mask_mod(b, h, i, j):
        return table[i]

    q, k, v = engine.qkv((1, 1, 46, 16))
    with pytest.raises(IndexRangeError):
        block_mask = flexmod.create_block_mask(
            mask_mod, None, None, 46, 46, device=engine.device, BLOCK_SIZE=32
        )
        flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=engine.backend)


@pytest.mark.parametrize("q_len,kv_len,tile,grid", [(24, 40, 16, (2, 3)), (20, 128, 128, (1, 1))])
def test_P007_the_tile_stays_as_asked(lane, check, q_len, kv_len, tile, grid):
    block_mask = flexmod.create_block_mask(
        causal, None, None, q_len, kv_len, device=lane.device, BLOCK_SIZE=tile
    )
    assert block_mask.tiles().shape == (1, 1, *grid)
    assert tuple(block_mask.block_size) == (tile, tile)
    assert tuple(block_mask.shape) == (1, 1, q_len, kv_len)
    check(lane, *lane.qkv((1, 2, q_len, 16), (1, 2, kv_len, 16)), None, causal, tile=tile)


# Lengths of the map, shape of the query, length of the keys, the number that the error must name.
MISFITS = {
    "48 v 16": ((48, 48), (1, 1, 16, 16), 16, 48),
    "128x256 v 2x2": ((128, 256), (2, 1, 2, 16), 2, 128),
    "1280 v 1200": ((1280, 1280), (1, 1, 1200, 16), 1200, 1280),
    "16 v 48": ((16, 16), (1, 1, 48, 16), 48, 16),
    "keys only": ((16, 48), (1, 1, 16, 16), 40, 48),
    "queries only": ((16, 48), (1, 1, 15, 16), 48, 16),
}


@pytest.mark.parametrize("case", MISFITS)
def test_P011_a_map_of_another_extent_is_refused(engine, case):
    lengths, q_shape, kv_len, named = MISFITS[case]
    q, k, v = engine.qkv(q_shape, (*q_shape[:2], kv_len, 16))
    block_mask = flexmod.create_block_mask(
        causal, None, None, *lengths, device=engine.device, BLOCK_SIZE=128
    )
    with pytest.raises(ArgumentError, match=rf"\b{named}\b"):
        flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=engine.backend)


@pytest.mark.parametrize("extent", [(3, 1), (1, 3)])
def test_P011_a_map_of_other_batches_or_heads_is_refused(engine, extent):
    q, k, v = engine.qkv((2, 2, 8, 16))
    block_mask = flexmod.create_block_mask(
        causal, *extent, 8, 8, device=engine.device, BLOCK_SIZE=16
    )
    with pytest.raises(ArgumentError):
        flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=engine.backend)


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("batch,q_len,kv_len", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_P050_nothing_there(lane, check, batch, q_len, kv_len, tile):
    q, k, v = lane.qkv((batch, 2, q_len, 16), (batch, 2, kv_len, 16))
    out, lse = check(lane, q, k, v, None, causal, tile=tile)
    assert out.shape == (batch, 2, q_len, 16) and lse.shape == (batch, 2, q_len)
    if kv_len == 0:
        assert (out == 0).all() and (lse == -math.inf).all()
