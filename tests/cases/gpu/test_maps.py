"""Maps on a GPU: moved from it, and made inside of CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import BlockMask, masks
from flexmod.testing import check_block_mask, naive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def causal(b, h, i, j):
    return i >= j


def test_P088_a_map_moves_with_its_tables():
    table = (torch.arange(64)[:, None] >= torch.arange(64)).cuda()

    def mask_mod(b, h, i, j):
        return table[i][j]

    there = flexmod.create_block_mask(mask_mod, None, None, 64, 64, BLOCK_SIZE=16)
    here = there.to("cpu")
    assert there.device.type == "cuda" and here.device.type == "cpu"
    assert torch.equal(here.dense(), there.dense().cpu())
    check_block_mask(here, causal)


@pytest.fixture
def replayed():
    """`replayed(make, fill, values)`: a map and attention in one CUDA graph, replayed for each of
    `values`, which `fill` writes where `make` reads. Yields them with inputs and results."""

    def replays(make, fill, values):
        q, k, v = (torch.randn(1, 2, 256, 64, device="cuda") for _ in range(3))
        held = make()
        attend = lambda: flexmod.flex_attention(q, k, v, block_mask=held)
        for _ in range(3):
            held.update_(make())
            attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.update_(make())
            out = attend()
        for value in values:
            fill(value)
            graph.replay()
            torch.cuda.synchronize()
            yield value, (q, k, v), out

    return replays


def test_P097_a_map_made_inside_a_cuda_graph(replayed):
    starts = torch.tensor([0, 100, 256, 256], dtype=torch.int64, device="cuda")
    make = lambda: BlockMask.from_documents(cu_seqlens=starts, causal=True, total=256)
    fill = lambda lengths: starts[1:].copy_(torch.tensor(lengths).cumsum(0))
    for lengths, qkv, out in replayed(make, fill, ([100, 156, 0], [17, 200, 39], [256, 0, 0])):
        ids = masks.document_ids(lengths).cuda()
        expected = naive(*qkv, mask_mod=masks.and_masks(causal, masks.document(ids)))[0]
        assert float((out - expected).abs().max()) < 1e-4


def test_P097_chosen_blocks_inside_a_cuda_graph(replayed):
    chosen = torch.tensor([[[[0, -1], [1, 0], [2, 2], [3, 0]]]], device="cuda")
    make = lambda: BlockMask.from_topk(chosen, 256, causal, BLOCK_SIZE=64, static=True)
    fill = lambda rows: chosen.copy_(torch.tensor([[rows]]))
    given = ([[0, 0], [0, 1], [0, 1], [0, 1]], [[0, -1], [-1, 1], [2, 1], [0, 3]])
    for rows, qkv, out in replayed(make, fill, given):
        listed = torch.zeros(4, 5, dtype=torch.bool).scatter_(1, torch.tensor(rows) % 5, True)
        blocks = listed.cuda()
        mask_mod = lambda b, h, i, j, blocks=blocks: blocks[i // 64, j // 64] & (i >= j)
        expected = naive(*qkv, mask_mod=mask_mod)[0]
        assert float((out - expected).abs().max()) < 1e-4
