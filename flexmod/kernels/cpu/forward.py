"""Forward: one pass over the runs of each row, with a running maximum and sums.

Sums are of exp(score - origin). FlashAttention-2 takes the running maximum for the origin, so that
every step subtracts it from all scores and rescales what was summed before. Here the origin of a
row is 0, and it moves to the maximum only when the maximum is farther from it than _REACH.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexmod.kernels.cpu import fused, walk
from flexmod.kernels.problem import Inputs, Problem, Result, new_output
from flexmod.kernels.reference import weighted_sum

# Scores up to here are rounded little, and float32 holds many exp(30) and e**-57 times exp(-30).
_REACH = 30.0


def forward(problem: Problem, inputs: Inputs) -> Result:
    given = inputs.query
    inputs = Inputs(*(x.to(problem.work_dtype) for x in inputs))
    if not problem.wants_max_scores and fused.serves(problem, inputs):
        return fused.forward(problem, inputs)
    out = new_output(problem, given)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.empty(shape, dtype=problem.work_dtype, device=problem.device)
    top = torch.empty_like(lse)
    _, key, value = inputs
    # Hidden values that are NaN must not count; looked for once, as it takes a pass.
    weigh = torch.matmul if walk.is_finite(value) else weighted_sum
    products = walk.Products()
    for row in walk.walk(problem, inputs):
        query = inputs.query[row.queries] * problem.scale
        result = _attend(problem, query, key[row.keys], value[row.keys], row, products, weigh)
        for target, source in zip((out, lse, top), result, strict=True):
            target[row.queries] = source
    return Result(out, lse, top)


def _attend(
    problem: Problem,
    query: Tensor,  # [b, h, rows, E], scaled
    key: Tensor,  # [b | 1, kv heads, KV, E]
    value: Tensor,  # [b | 1, kv heads, KV, Ev]
    row: walk.Row,
    products: walk.Products,
    weigh: Callable[[Tensor, Tensor], Tensor],  # weights, values -> their product
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and maximum of one row of query blocks."""
    batch, heads, rows, _ = query.shape
    grouped = (batch, key.shape[1], heads // key.shape[1] * rows)  # heads of a group side by side
    query = query.reshape(*grouped, -1)
    top = query.new_full((batch, heads, rows, 1), -torch.inf)
    origin, total = torch.zeros_like(top), torch.zeros_like(top)
    out = query.new_zeros(batch, heads, rows, value.shape[-1])
    moved = False
    for keys in row.steps:
        score = products("score", query, key[:, :, keys.span].mT)
        indices = walk.index_tensors(problem, row, keys)
        visible = walk.visible_positions(problem, keys, indices)
        score = walk.modified(problem, score.view(batch, heads, rows, -1), indices, visible)
        top = torch.maximum(top, score.amax(-1, keepdim=True))
        if moved or not _is_near(top):
            far = ((top - origin).abs() > _REACH) & (top != -torch.inf)
            if bool(far.any()):
                before, origin, moved = origin, torch.where(far, top, origin), True
                factor = torch.exp((before - origin).clamp(max=0.0))  # may fall if nothing was seen
                total, out = total * factor, out * factor
        weight = walk.exponential(problem, score, origin if moved else None)
        total += weight.sum(-1, keepdim=True)
        keep = walk.kept(problem, indices)
        weight = weight if keep is None else weight * keep
        out += weigh(weight.view(*grouped, -1), value[:, :, keys.span]).view_as(out)
    return _finish(problem, row, out, total, origin, top)


def _is_near(top: Tensor) -> bool:
    """Whether all maxima are in reach of 0."""
    lowest, highest = torch.aminmax(top)
    return float(lowest) >= -_REACH and float(highest) <= _REACH


def _finish(
    problem: Problem, row: walk.Row, out: Tensor, total: Tensor, origin: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide once, at the end; a sink joins the sum with no value of its own."""
    if problem.sink is not None:
        sink = problem.sink[row.heads].to(total.dtype).view(-1, 1, 1)
        higher = torch.maximum(top, sink)
        rescale = torch.exp((origin - higher).clamp(max=_REACH))  # no more where anything was seen
        out, total = out * rescale, total * rescale + torch.exp(sink - higher)
        origin = higher
    blind = total == 0
    safe = torch.where(blind, 1.0, total)
    lse = torch.where(blind, -torch.inf, origin + torch.log(safe))
    return out / safe, lse.squeeze(-1), top.squeeze(-1)
