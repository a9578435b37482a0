"""What can go wrong on a GPU only."""

from __future__ import annotations

import pytest
import torch

import flexmod
from flexmod.testing import naive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def causal(b, h, i, j):
    return i >= j


@pytest.mark.parametrize("mask_mod", [None, causal])
@pytest.mark.parametrize("backend", [None, "fa2"])
def test_P077_fp32_is_fp32_by_default(backend, mask_mod):
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda") for _ in range(3))
    assert q.dtype == torch.float32
    out, lse = flexmod.flex_attention(
        q, k, v, block_mask=mask_mod, return_lse=True, backend=backend
    )
    expected, expected_lse, _ = naive(q, k, v, mask_mod=mask_mod)
    assert float((out - expected).abs().max()) < 1e-5
    assert float((lse - expected_lse).abs().max()) < 1e-5


@pytest.mark.parametrize("batch,heads", [(70_000, 1), (7, 10_000), (1, 70_000)])
@pytest.mark.parametrize("backend", [None, "fa2"])
def test_P098_more_heads_than_a_grid_axis_holds(backend, batch, heads):
    q, k, v = (torch.randn(batch, heads, 16, 16, device="cuda") for _ in range(3))
    out = flexmod.flex_attention(q, k, v, backend=backend)
    score = q.double() @ k.double().mT / 4
    expected = score.softmax(-1) @ v.double()
    assert float((out - expected).abs().max()) < 1e-5
