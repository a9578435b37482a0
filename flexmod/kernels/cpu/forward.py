"""Forward: one pass over the runs of each row, with a running maximum and sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexmod.kernels.cpu import walk
from flexmod.kernels.problem import Inputs, Problem, Result, new_output
from flexmod.kernels.reference import weighted_sum


def forward(problem: Problem, inputs: Inputs) -> Result:
    out = new_output(problem, inputs.query)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.empty(shape, dtype=problem.work_dtype, device=problem.device)
    top = torch.empty_like(lse)
    key, value = (x.to(problem.work_dtype) for x in (inputs.key, inputs.value))
    # Hidden values that are NaN must not count; looked for once, as it takes a pass.
    product = torch.matmul if bool(value.isfinite().all()) else weighted_sum
    for row in walk.walk(problem, inputs):
        query = inputs.query[row.queries].to(problem.work_dtype) * problem.scale
        result = _attend(problem, query, key[row.keys], value[row.keys], row, product)
        for target, source in zip((out, lse, top), result, strict=True):
            target[row.queries] = source
    return Result(out, lse, top)


def _attend(
    problem: Problem,
    query: Tensor,  # [b, h, rows, E], scaled
    key: Tensor,  # [b | 1, kv heads, KV, E]
    value: Tensor,  # [b | 1, kv heads, KV, Ev]
    row: walk.Row,
    product: Callable[[Tensor, Tensor], Tensor],  # of weights and values
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and maximum of one row of query blocks."""
    batch, heads, rows, _ = query.shape
    grouped = (batch, key.shape[1], heads // key.shape[1] * rows)  # heads of a group side by side
    query = query.reshape(*grouped, -1)
    top = query.new_full((batch, heads, rows, 1), -torch.inf)
    total = torch.zeros_like(top)
    out = query.new_zeros(*grouped, value.shape[-1])
    for keys in row.steps:
        score = query @ key[:, :, keys.span].transpose(-1, -2)
        indices = walk.index_tensors(row, keys, query.device)
        visible = walk.visible_positions(problem, keys, indices)
        score = walk.modified(problem, score.view(batch, heads, rows, -1), indices, visible)
        higher = torch.maximum(top, score.amax(-1, keepdim=True))
        origin = torch.where(higher == -torch.inf, 0.0, higher)  # nothing seen so far
        weight = walk.subtracted(problem, score, origin).exp_()
        rescale = torch.exp(top - origin)
        total = total * rescale + weight.sum(-1, keepdim=True)
        keep = walk.kept(problem, indices)
        weight = weight if keep is None else weight * keep
        seen = product(weight.view(*grouped, -1), value[:, :, keys.span])
        out = out * rescale.view(*grouped, 1) + seen
        top = higher
    return _finish(problem, row, out.view(batch, heads, rows, -1), total, top)


def _finish(
    problem: Problem, row: walk.Row, out: Tensor, total: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide once, at the end; a sink joins the sum with no value of its own."""
    largest = top
    if problem.sink is not None:
        sink = problem.sink[row.heads].to(total.dtype).view(-1, 1, 1)
        higher = torch.maximum(top, sink)
        rescale = torch.exp(top - higher)
        out, total = out * rescale, total * rescale + torch.exp(sink - higher)
        top = higher
    blind = total == 0
    safe = torch.where(blind, 1.0, total)
    lse = torch.where(blind, -torch.inf, top + torch.log(safe))
    return out / safe, lse.squeeze(-1), largest.squeeze(-1)
