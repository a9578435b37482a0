"""Backward where offsets pass 2**31: needs a GPU with much memory."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod import masks

_KV, _HEADS, _DIM = 24_000, 8, 128
_BATCH = 2**31 // (_KV * _HEADS * _DIM) + 2  # batch stride x index passes 2**31
_NEEDED = 7 * _BATCH * _KV * _HEADS * _DIM * 2 + 2**31  # q, k, v, out and gradients in bytes


def _memory() -> int:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


@pytest.mark.skipif(_memory() < 1.2 * _NEEDED, reason="needs a CUDA device with 40 GB of memory")
@pytest.mark.parametrize("layout", ["batch first", "sequence first"])
def test_P100_backward_of_a_tensor_beyond_32_bits(layout):
    def make():
        if layout == "batch first":
            x = torch.randn(_BATCH, _KV, _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
            return x.transpose(1, 2).requires_grad_()
        x = torch.randn(_KV, _BATCH, _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
        return x.permute(1, 2, 0, 3).requires_grad_()

    query, key, value = make(), make(), make()
    assert query.numel() > 2**31
    mask = flexmod.create_block_mask(masks.sliding_window(128), None, None, _KV, _KV, "cuda")
    out = flexmod.flex_attention(query, key, value, block_mask=mask)
    out.backward(torch.ones_like(out))
    # The last rows of the last batch lie beyond 2**31; the first ones check the slice itself.
    for b in (0, _BATCH - 1):
        for rows in (slice(0, 512), slice(_KV - 512, _KV)):
            leaves = [
                x.detach()[b : b + 1, :, rows].clone().requires_grad_() for x in (query, key, value)
            ]
            part = flexmod.flex_attention(*leaves, block_mask=masks.sliding_window(128))
            part.backward(torch.ones_like(part))
            # Away from the cut, where rows see keys outside of the slice.
            inner = slice(0, 384) if rows.start == 0 else slice(128, 512)
            for x, leaf in zip((query, key, value), leaves, strict=True):
                got = x.grad[b : b + 1, :, rows][:, :, inner]
                torch.testing.assert_close(got, leaf.grad[:, :, inner], rtol=2e-2, atol=2e-2)
