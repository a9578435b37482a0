"""How far a candidate is from attention in float64: relative error, ||x - exact|| / ||exact||.

The forward is compared on sampled rows of every head, the backward on one head as a whole, as
gradients of keys and values take all rows to work out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmod.bench.case import Call, Case
from flexmod.testing import naive

_ROWS = 48  # sampled of a sequence
_AT_ONCE = 1 << 25  # float64 scores


def reference(case: Case) -> Callable[[Call, Any], float]:
    """A function of a candidate and what its `runner` returned. Works the exact values out once."""
    return _forward(case) if case.direction == "forward" else _backward(case)


def _forward(case: Case) -> Callable[[Call, Any], float]:
    batch, heads, seqlen, _ = case.query.shape
    count = max(1, min(_ROWS, seqlen, _AT_ONCE // (batch * heads * seqlen)))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(seqlen, generator=generator)[:count].to(case.query.device)
    with torch.no_grad():
        exact, _, _ = naive(*case.tensors, case.score_mod, case.mask_mod, rows=rows)
    return lambda call, out: relative(call.layout.back(out)[:, :, rows], exact)


def _backward(case: Case) -> Callable[[Call, Any], float]:
    exact = _exact_gradients(case)

    def error(call: Call, gradients: Sequence[Tensor]) -> float:
        found = [call.layout.back(g)[:1, :1] for g in gradients[:3]]
        return max(relative(f, e) for f, e in zip(found, exact, strict=True))

    return error


def _exact_gradients(case: Case) -> list[Tensor]:
    """Of query, key and value of the first head of the first batch, slices of rows at a time."""
    query, key, value = leaves = [
        x.detach()[:1, :1].double().requires_grad_() for x in case.tensors
    ]
    total = [torch.zeros_like(x) for x in leaves]
    seqlen, device = case.row.seqlen, case.query.device
    for rows in torch.arange(seqlen, device=device).split(max(1, _AT_ONCE // seqlen)):
        out, _, _ = naive(query, key, value, case.score_mod, case.mask_mod, rows=rows)
        found = torch.autograd.grad(out, leaves, case.d_out[:1, :1, rows].double())
        for sums, part in zip(total, found, strict=True):
            sums += part
    return total


def relative(found: Tensor, exact: Tensor) -> float:
    exact = exact.detach()
    return float((found.detach().double() - exact).norm() / exact.norm())
