"""Maps under torch.compile(fullgraph=True): made inside, made outside, torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

import flexmod
from flexmod import BlockMaskError, masks, mods
from flexmod.testing import assert_matches, naive

HEADS, LENGTH = 2, 24  # of `qkv`
IDS = torch.arange(LENGTH) // 10


def part(qkv, length):
    return [x.detach()[:, :, :length].requires_grad_() for x in qkv]


def test_a_map_made_inside_from_ids_computed_inside(agrees, qkv):
    def call(q, k, v, starts):
        ids, length = starts.cumsum(0), q.shape[2]

        def same_document(b, h, q_idx, kv_idx):
            return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

        block_mask = flexmod.create_block_mask(
            same_document, None, None, length, length, BLOCK_SIZE=16
        )
        return flexmod.flex_attention(q, k, v, mods.alibi(HEADS), block_mask)

    starts = [(torch.arange(LENGTH) % n == 0).long() for n in (7, 11)]
    assert agrees(call, *((*qkv, s) for s in starts)) == 1


def test_a_map_made_inside_for_any_length(agrees, qkv):
    def call(q, k, v):
        block_mask = flexmod.create_block_mask(
            masks.sliding_window(9), None, None, q.shape[2], k.shape[2], BLOCK_SIZE=16
        )
        return flexmod.flex_attention(q, k, v, None, block_mask)

    assert agrees(call, *(part(qkv, n) for n in (24, 17, 21))) == 2


def test_create_block_mask_compiled(agrees, qkv):
    """What torch's documentation recommends: the result is an ordinary map."""
    create = torch.compile(flexmod.create_block_mask, fullgraph=True, backend="aot_eager")
    same = lambda b, h, q_idx, kv_idx: IDS[q_idx] == IDS[kv_idx]
    made = create(same, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)
    call = lambda q, k, v, m: flexmod.flex_attention(q, k, v, None, m)
    agrees(call, (*qkv, made))
    wanted = flexmod.create_block_mask(same, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)
    assert isinstance(made, flexmod.BlockMask)
    assert torch.equal(made.tiles(), wanted.tiles())
    assert torch.equal((made & made).dense(), wanted.dense())
    agrees(call, (*qkv, made))


def test_the_mask_of_a_map_inside_of_another_mask(agrees, qkv):
    whole = flexmod.create_block_mask(
        flexmod.and_masks(masks.causal(), masks.document(IDS)), None, None, LENGTH, LENGTH
    )

    def call(q, k, v, position):
        later = lambda b, h, q_idx, kv_idx: whole.mask_mod(b, h, q_idx + position, kv_idx)
        return flexmod.flex_attention(q[:, :, :1], k, v, None, later)

    assert agrees(call, *((*qkv, torch.tensor(n)) for n in (3, LENGTH - 1))) == 1


def test_a_map_of_ids_that_changed_is_refused_when_the_graph_runs(qkv):
    ids = IDS.clone()
    made = flexmod.create_block_mask(masks.document(ids), None, None, LENGTH, LENGTH)
    call = lambda q, k, v, m: flexmod.flex_attention(q, k, v, None, m)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, made), call(*qkv, made))
    ids[5] = 7
    with pytest.raises(BlockMaskError, match="changed in place"):
        compiled(*qkv, made)
    made = flexmod.create_block_mask(masks.document(ids), None, None, LENGTH, LENGTH)
    torch.testing.assert_close(compiled(*qkv, made), call(*qkv, made))


@pytest.mark.parametrize("mask_mod", [None, masks.causal()])
def test_torchs_own_map(agrees, qkv, mask_mod):
    """Its lists are obeyed, and its mask inside of them."""
    counts = torch.tensor([[[1, 0, 2]]], dtype=torch.int32)
    columns = torch.tensor([[[[2, 0, 0], [0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    theirs = torch_flex.BlockMask.from_kv_blocks(
        counts, columns, BLOCK_SIZE=8, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH)
    )
    call = lambda q, k, v, m: flexmod.flex_attention(q, k, v, None, m)
    assert agrees(call, (*qkv, theirs)) == 1
    seen = torch.zeros(3, 3, dtype=torch.bool)
    seen[[0, 2, 2], [2, 0, 1]] = True
    tokens = seen.repeat_interleave(8, 0).repeat_interleave(8, 1)
    if mask_mod is not None:
        tokens = tokens.tril()
    wanted = naive(*qkv, None, lambda b, h, i, j: tokens[i, j])[0]
    assert_matches(call(*qkv, theirs), wanted)
