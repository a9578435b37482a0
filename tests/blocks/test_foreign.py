"""torch's own BlockMask is taken wherever ours is, with the meaning that its lists give it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import flexmod
from flexmod import BlockMaskError
from flexmod.blocks.foreign import from_torch
from flexmod.testing import assert_matches, naive

CUTS = torch.tensor([[9, 40, 77]])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_head(b, h, q_idx, kv_idx):
    return kv_idx < CUTS[b, h]


def torchs(mask_mod=causal, heads=None, q_len=100, kv_len=100, size=16):
    return theirs.create_block_mask(mask_mod, 1, heads, q_len, kv_len, "cpu", size)


@pytest.mark.parametrize(
    ("mask_mod", "heads", "lengths"),
    [(causal, None, (100, 100)), (causal, None, (64, 128)), (by_head, 3, (70, 100))],
)
def test_a_map_of_torch_serves_a_call(mask_mod, heads, lengths, engine):
    query = engine.randn(2 if heads is None else 1, 3, lengths[0], 16)
    key, value = engine.randn(2, *query.shape[:2], lengths[1], 16).unbind()
    device = engine.device
    given = torchs(mask_mod, heads, *lengths).to(device)
    if device.type != "cpu" and mask_mod is by_head:
        pytest.skip("its mask captures a tensor on the CPU")
    out = flexmod.flex_attention(query, key, value, None, given, backend=engine.backend)
    assert_matches(out, naive(query, key, value, None, mask_mod)[0])


def test_lists_in_any_order_and_blocks_beside_the_mask():
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    partial = torch.tensor([[[[2, 0, 7], [1, 2, 0]]]], dtype=torch.int32)  # 7 does not count
    full = torch.tensor([[[[1, 0, 0], [0, 0, 0]]]], dtype=torch.int32)
    given = theirs.BlockMask.from_kv_blocks(
        counts, partial, torch.tensor([[[1, 0]]], dtype=torch.int32), full, 8, causal,
        compute_q_blocks=False,
    )  # fmt: skip
    made = from_torch(given)
    assert made.tiles()[0, 0].tolist() == [[1, 2, 1], [0, 1, 0]]
    expected = torch.zeros(16, 24, dtype=torch.bool)
    for rows, columns, every in ((0, 0, False), (0, 1, True), (0, 2, False), (1, 1, False)):
        rows, columns = torch.arange(8) + 8 * rows, torch.arange(8) + 8 * columns
        seen = torch.ones(8, 8, dtype=torch.bool) if every else rows[:, None] >= columns
        expected[rows[:, None], columns] = seen
    assert torch.equal(made.dense()[0, 0], expected)


def test_a_map_without_a_mask():
    counts = torch.tensor([[[1]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0]]]], dtype=torch.int32)
    given = theirs.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4)
    assert from_torch(given).dense()[0, 0, 0].tolist() == [False] * 4 + [True] * 4


def test_a_map_is_made_once_and_anew_when_it_changes():
    given = torchs()
    first = from_torch(given)
    assert from_torch(given) is first and from_torch(torchs()) is not first
    given.mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx
    second = from_torch(given)
    assert second is not first and not second.dense()[0, 0].diagonal().any()
    given.kv_num_blocks.zero_()
    assert from_torch(given).counts()[1] == 0


def test_a_slice_of_torch_has_lost_its_mask():
    part = torchs()[:, :, :2]
    with pytest.raises(BlockMaskError, match="torch drops the mask of a slice"):
        from_torch(part)
    part.mask_mod, part.seq_lengths = causal, (32, 100)
    assert torch.equal(from_torch(part).dense(), from_torch(torchs())[:, :, :2].dense())


def test_what_it_refuses():
    query = torch.randn(1, 3, 100, 8)
    with pytest.raises(BlockMaskError, match="Q_LEN, KV_LEN = \\(64, 100\\)"):
        flexmod.flex_attention(query, query, query, None, torchs(q_len=64))
    with pytest.raises(BlockMaskError, match="H=1 but its mask reads h"):
        flexmod.flex_attention(query, query, query, None, torchs(by_head))
