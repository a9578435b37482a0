"""Maps and the tensors that their masks capture: other devices, changes in place."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import BlockMask, masks
from flexmod.errors import BlockMaskError, DeviceError
from flexmod.testing import assert_matches, check_block_mask, naive


def causal(b, h, i, j):
    return i >= j


def test_P088_tables_on_another_device():
    table = torch.ones(8, 8, dtype=torch.bool)

    def mask_mod(b, h, i, j):
        return table[i][j]

    with pytest.raises(DeviceError, match=r"cpu.*meta|meta.*cpu"):
        flexmod.create_block_mask(mask_mod, None, None, 8, 8, device="meta")
    block_mask = flexmod.create_block_mask(mask_mod, None, None, 8, 8, device="cpu")
    moved = block_mask.to("meta")
    assert moved.device.type == "meta" and block_mask.device.type == "cpu"
    assert [c.device.type for c in moved.program.captures] == ["meta"]
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(DeviceError, match="meta") as error:
        flexmod.flex_attention(q, q, q, block_mask=moved)
    assert "cpu" in str(error.value)
    with pytest.raises(DeviceError, match="meta") as error:
        block_mask & moved
    assert "cpu" in str(error.value)


def _documents_in(block_mask):
    """Where each document begins, of a map made by from_documents."""
    return block_mask.program.captures[0]


def test_P097_a_map_is_updated_in_place(engine):
    """What a CUDA graph replays: the same tensors, filled anew."""
    first, second = (
        BlockMask.from_documents(lengths=n, causal=True, BLOCK_SIZE=16, device=engine.device)
        for n in ([20, 44], [7, 50, 7])
    )
    q, k, v = engine.qkv((1, 2, 64, 16))
    attend = lambda: flexmod.flex_attention(q, k, v, block_mask=first, backend=engine.backend)
    attend()
    tensors = first.runs.spans, first.runs.table, _documents_in(first)
    addresses = [t.data_ptr() for t in tensors]
    first.update_(second)
    assert addresses == [
        t.data_ptr() for t in (first.runs.spans, first.runs.table, _documents_in(first))
    ]
    ids = masks.document_ids([7, 50, 7]).to(engine.device)
    check_block_mask(first, masks.and_masks(causal, masks.document(ids)))
    mask_mod = masks.and_masks(causal, masks.document(_documents_in(second)))
    assert_matches(attend(), naive(q, k, v, mask_mod=mask_mod)[0])


@pytest.mark.parametrize("change", ["shape", "mask", "size"])
def test_P097_only_a_map_of_the_same_kind_is_taken_over(change):
    made = BlockMask.from_window(7, 64, BLOCK_SIZE=16, device="cpu")
    others = {
        "shape": BlockMask.from_window(7, 48, BLOCK_SIZE=16, device="cpu"),
        "mask": BlockMask.from_window(8, 64, BLOCK_SIZE=16, device="cpu"),
        "size": BlockMask.from_window(7, 64, BLOCK_SIZE=32, device="cpu"),
    }
    before = made.tiles()
    with pytest.raises(BlockMaskError, match="other"):
        made.update_(others[change])
    assert torch.equal(made.tiles(), before)


def test_P083_tables_without_a_version_counter():
    with torch.inference_mode():
        ids = torch.arange(64) // 16
    block_mask = flexmod.create_block_mask(masks.document(ids), None, None, 64, 64, "cpu")
    q = torch.randn(1, 1, 64, 16)
    flexmod.flex_attention(q, q, q, block_mask=block_mask)
    with torch.inference_mode():
        ids[:32] = 7
    with pytest.raises(BlockMaskError, match="changed in place"):
        flexmod.flex_attention(q, q, q, block_mask=block_mask)
