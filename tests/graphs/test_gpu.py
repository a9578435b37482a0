"""Compiled calls on a GPU: inductor, its CUDA graphs, and training under both."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks, mods
from flexmod.testing import assert_matches, naive, naive_same_dtype

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEADS = 4


def inputs(length, dtype=torch.bfloat16):
    return [
        torch.randn(2, HEADS, length, 64, device="cuda", dtype=dtype).requires_grad_()
        for _ in range(3)
    ]


def attention(query, key, value, slopes, block_mask):
    def biased(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    return flexmod.flex_attention(query.sin(), key, value, biased, block_mask) * 2


def causal_map(length):
    return flexmod.create_block_mask(masks.causal(), None, None, length, length, device="cuda")


def documents_map(length):
    ids = torch.arange(length, device="cuda") // 100
    ids += 1  # so that its counter of changes is not that of a fresh copy
    mask_mod = masks.and_masks(masks.causal(), masks.document(ids))
    return flexmod.create_block_mask(mask_mod, None, None, length, length, device="cuda")


@pytest.mark.parametrize("made", [causal_map, documents_map, lambda length: None])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_step(mode, made):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    block_mask = made(300)
    for _ in range(4):  # warm-up, recording, and replays with other values
        given = inputs(300)
        slopes = torch.rand(HEADS, device="cuda").requires_grad_()
        leaves = [*given, slopes]
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for call in (attention, compiled):
            out = call(*leaves, block_mask)
            results.append([out.detach().clone(), *torch.autograd.grad(out.float().sum(), leaves)])
        for got, expected in zip(*results[::-1], strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_replays_are_right_against_float64():
    torch._dynamo.reset()
    call = lambda q, k, v, m: flexmod.flex_attention(q, k, v, mods.softcap(20.0), m)
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    block_mask = causal_map(257)
    with torch.no_grad():
        for _ in range(4):
            given = [x.detach() for x in inputs(257)]
            named = (*given, mods.softcap(20.0), masks.causal())
            out = compiled(*given, block_mask)
            assert_matches(out, naive(*named)[0], naive_same_dtype(*named)[0])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_map_made_inside(mode):
    """It is decided when the graph runs, outside of a CUDA graph."""
    torch._dynamo.reset()

    def call(query, key, value, ids):
        length = query.shape[2]
        same = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
        block_mask = flexmod.create_block_mask(same, None, None, length, length, device="cuda")
        return flexmod.flex_attention(query, key, value, None, block_mask, dropout_p=0.0)

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for seed in range(4):
        given = inputs(300, torch.float32)
        ids = (torch.rand(300, device="cuda") < 0.02).cumsum(0) + seed
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given, ids), call(*given, ids))


def test_few_compiles_over_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    slopes = torch.rand(HEADS, device="cuda").requires_grad_()
    # Maps of one row of blocks have a graph of their own: torch tells a size of 1 from all others.
    several = dict.fromkeys((300, 1024, 513, 200), 2)
    for length, most in ({128: 1} | several | {77: 3, 64: 3, 400: 3}).items():
        leaves = [*inputs(length), slopes]
        out, expected = (f(*leaves, causal_map(length)) for f in (compiled, attention))
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        out.float().sum().backward()
        assert counter.frame_count <= most
