"""Maps that are cut, reused, moved, or made of lists: what went wrong with them elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flexmod
from flexmod import BlockMask, masks
from flexmod.errors import ArgumentError, BlockMaskError
from flexmod.testing import assert_matches, check_block_mask, naive, visible


def causal(b, h, i, j):
    return i >= j


def _attend(lane, q, k, v, block_mask):
    return flexmod.flex_attention(q, k, v, block_mask=block_mask, backend=lane.backend)


@pytest.mark.parametrize("piece", [slice(0, 1), 0, -4, [0]])
def test_P008_a_cut_map_says_what_it_covers(lane, piece):
    whole = flexmod.create_block_mask(causal, None, None, 64, 64, lane.device, BLOCK_SIZE=16)
    first = whole[:, :, piece]
    assert first.shape == (1, 1, 16, 64)
    assert first.seq_lengths == (16, 64) and first.offset == (0, 0)
    q, k, v = lane.qkv((1, 2, 64, 16))
    out = _attend(lane, q[:, :, :16], k, v, first)
    assert_matches(out, naive(q, k, v, mask_mod=causal)[0][:, :, :16])
    with pytest.raises(BlockMaskError, match="16"):
        _attend(lane, q, k, v, first)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("heads", [None, 4])
def test_P010_an_integer_keeps_the_axis(lane, row, heads):
    whole = flexmod.create_block_mask(causal, None, heads, 64, 64, lane.device, BLOCK_SIZE=16)
    part = whole[:, :, row]
    assert part.shape == (1, heads or 1, 16, 64)
    assert part.kv_indices.shape == (1, heads or 1, 1, 4)
    assert part.offset == (16 * row, 0)
    q, k, v = lane.qkv((4, 4, 64, 16))
    rows = slice(16 * row, 16 * row + 16)
    expected = naive(q, k, v, mask_mod=causal)[0]
    assert_matches(_attend(lane, q[:, :, rows], k, v, part), expected[:, :, rows])
    # One query token a batch: the first row of the block.
    token = q[:, :, 16 * row : 16 * row + 1]
    single = _attend(lane, token, k, v, part.crop(q_len=1))
    assert_matches(single, expected[:, :, 16 * row : 16 * row + 1])


@pytest.mark.parametrize("row", [4, -5, True, 1.0, "0"])
def test_P010_what_is_no_block_is_refused(row):
    whole = flexmod.create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match="q_blocks"):
        whole[:, :, row]


@pytest.mark.parametrize("kv_len", [1, 2, 10, 17, 20])
def test_P013_keys_cut_behind_the_maps_back(engine, kv_len):
    q_ids = torch.repeat_interleave(torch.arange(2), torch.tensor([4, 6])).to(engine.device)
    kv_ids = torch.repeat_interleave(torch.arange(2), torch.tensor([9, 11])).to(engine.device)

    def block_diagonal(b, h, i, j):
        return q_ids[i] == kv_ids[j]

    block_mask = flexmod.create_block_mask(block_diagonal, None, None, 10, 20, engine.device)
    q, k, v = engine.qkv((1, 4, 10, 8), (1, 4, 20, 8))
    short_k, short_v = k[:, :, :kv_len], v[:, :, :kv_len]
    expected = naive(q, short_k, short_v, mask_mod=block_diagonal)[0]
    if kv_len == 20:
        assert_matches(_attend(engine, q, k, v, block_mask), expected)
        return
    with pytest.raises(ArgumentError, match="20"):
        _attend(engine, q, short_k, short_v, block_mask)
    out = _attend(engine, q, short_k, short_v, block_mask.crop(kv_len=kv_len))
    assert_matches(out, expected)


def test_P017_partial_lists_and_full_lists_say_the_same(lane):
    q, k, v = lane.qkv((1, 2, 64, 16))
    tile = {"BLOCK_SIZE": 16, "seq_lengths": (64, 64)}
    live = torch.ones(4, 4).tril().bool().to(lane.device)
    diagonal = torch.eye(4).bool().to(lane.device)
    lists = {
        name: (table.sum(-1)[None, None].int(), _first(table)[None, None])
        for name, table in (("live", live), ("diagonal", diagonal), ("below", live & ~diagonal))
    }
    all_partial = BlockMask.from_kv_blocks(*lists["live"], mask_mod=causal, **tile)
    both = BlockMask.from_kv_blocks(*lists["diagonal"], *lists["below"], mask_mod=causal, **tile)
    assert all_partial.counts() == (6, 10, 0) and both.counts() == (6, 4, 6)
    one, other = (_attend(lane, q, k, v, m) for m in (all_partial, both))
    expected = naive(q, k, v, mask_mod=causal)[0]
    assert_matches(one, expected)
    assert_matches(other, expected)
    if lane.dtype == torch.float64:
        assert float((one - other).abs().max()) <= 1e-12


def _first(table):
    """The selected columns of each row first, ascending: an index list."""
    return table.int().argsort(dim=-1, descending=True, stable=True).int()


def test_P019_sparsity_is_a_percentage():
    lengths = [10, 10, 20, 20, 20, 20]
    mask_mod = masks.and_masks(causal, masks.document(masks.document_ids(lengths)))
    block_mask = flexmod.create_block_mask(mask_mod, None, None, 100, 100, "cpu")
    assert block_mask.counts() == (0, 1, 0)
    assert block_mask.sparsity() == 0.0
    kept = sum(n * (n + 1) // 2 for n in lengths)
    assert block_mask.density() == pytest.approx(100 * kept / 10_000)
    finer = flexmod.create_block_mask(mask_mod, None, None, 100, 100, "cpu", BLOCK_SIZE=10)
    assert finer.sparsity() == 100 * finer.counts()[0] / 100 > 50
    assert finer.density() == block_mask.density()


def _image_or_window(b, h, i, j):
    window = (i >= j) & (i - j < 6)
    in_image = (i >= 4) & (i < 10) & (j >= 4) & (j < 10)
    return window | in_image


@pytest.mark.parametrize("size", [8, 4, (8, 16)])
def test_P023_a_chunk_sees_absolute_positions(lane, size):
    q, k, v = lane.qkv((1, 2, 40, 16))
    whole = flexmod.create_block_mask(
        _image_or_window, None, None, 40, 40, lane.device, BLOCK_SIZE=size
    )
    expected = naive(q, k, v, mask_mod=_image_or_window)[0]
    high = whole.block_size[0]
    for start in (0, 8, 32):
        rows = slice(start, start + 8)
        cut = whole[:, :, start // high : (start + 8) // high]
        assert cut.shape == (1, 1, 8, 40) and cut.offset == (start, 0)
        moved = masks.shift(_image_or_window, q_offset=start)
        made = flexmod.create_block_mask(moved, None, None, 8, 40, lane.device, BLOCK_SIZE=size)
        assert torch.equal(cut.tiles(), made.tiles())
        for chunk in (cut, made):
            assert_matches(_attend(lane, q[:, :, rows], k, v, chunk), expected[:, :, rows])


def test_P023_a_score_mod_goes_on_seeing_the_tensors_given(lane):
    """The offset of a cut map concerns its own mask only."""
    q, k, v = lane.qkv((1, 2, 40, 16))
    cut = flexmod.create_block_mask(causal, None, None, 40, 40, lane.device, BLOCK_SIZE=8)[:, :, 4]
    late = masks.shift(causal, q_offset=32)

    def score_mod(score, b, h, i, j):
        return score - 0.1 * (i - j)

    last = q[:, :, 32:]
    out = flexmod.flex_attention(last, k, v, score_mod, cut, backend=lane.backend)
    assert_matches(out, naive(last, k, v, score_mod, late)[0])


def _window_and_sink(b, h, i, j):
    return ((i >= j) & (i - j <= 6)) | ((i >= 4) & (j <= 4))


def test_P034_a_long_map_on_a_short_input(lane, check):
    long_q, long_k, long_v = lane.qkv((1, 2, 40, 16))
    check(lane, long_q, long_k, long_v, None, _window_and_sink, tile=16)
    long = flexmod.create_block_mask(
        _window_and_sink, None, None, 40, 40, lane.device, BLOCK_SIZE=16
    )
    q, k, v = (x[:, :, :20] for x in (long_q, long_k, long_v))
    with pytest.raises(ArgumentError, match="40"):
        _attend(lane, q, k, v, long)
    short = long.crop(20, 20)
    made = flexmod.create_block_mask(
        _window_and_sink, None, None, 20, 20, lane.device, BLOCK_SIZE=16
    )
    assert torch.equal(short.tiles(), made.tiles())
    assert_matches(_attend(lane, q, k, v, short), naive(q, k, v, mask_mod=_window_and_sink)[0])
    check(lane, q, k, v, None, _window_and_sink, tile=16)


def test_P014_a_cut_batch_is_that_batch():
    counters = torch.tensor([3, 150])
    both = flexmod.create_block_mask(
        lambda b, h, i, j: j <= counters[b], 2, None, 64, 256, "cpu", BLOCK_SIZE=64
    )
    for batch in range(2):
        one = both[batch]
        assert one.shape == (1, 1, 64, 256) and "b" not in one.program.reads
        check_block_mask(one, lambda b, h, i, j, n=int(counters[batch]): j <= n)


def test_P020_a_cut_map_is_token_level_too():
    whole = flexmod.create_block_mask(causal, None, None, 24, 24, "cpu", BLOCK_SIZE=8)
    part = dataclasses.replace(whole)[:, :, 1:]
    assert torch.equal(part.dense(), visible(causal, 1, 1, 24, 24)[:, :, 8:])
