"""The `reference` engine: naive masked softmax. The oracle of every test, and differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.kernels import dropout
from flexmod.kernels.problem import Inputs, Problem, Result, stride_order
from flexmod.program.evaluate import evaluate, on_grid, raise_if_invalid
from flexmod.program.transforms import is_wrapped


def refuses(problem: Problem) -> str | None:
    """It serves everything that fits in memory."""
    return None


def forward(problem: Problem, inputs: Inputs) -> Result:
    """All scores at once: float64 for float64 inputs, else float32."""
    work = problem.work_dtype
    query = inputs.query.to(work)
    key, value = (_per_query_head(x.to(work), problem) for x in (inputs.key, inputs.value))
    visible = visible_positions(problem)
    if visible is not None:  # what no query sees may be anything, NaN too
        seen = visible.any(-2).expand(*key.shape[:3]).unsqueeze(-1)
        key, value = torch.where(seen, key, 0.0), torch.where(seen, value, 0.0)
    score = query @ key.transpose(-1, -2) * problem.scale
    score = modified_scores(problem, score, visible)
    lowest = score.new_full((*score.shape[:-1], 1), -torch.inf)
    top = score.detach().amax(-1, keepdim=True) if problem.kv_len else lowest
    sink = None if problem.sink is None else problem.sink.to(work).view(-1, 1, 1)
    highest = top if sink is None else torch.maximum(top, sink.detach())
    origin = torch.where(highest == -torch.inf, 0.0, highest)  # a row that sees nothing
    weight = torch.exp(score - origin)
    total = weight.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - origin)
    blind = total == 0
    if problem.dropout_p:
        keep = dropout.keep(problem.dropout_seed, problem.dropout_p, index_inputs(problem))
        weight = weight * keep / (1 - problem.dropout_p)
    out = weighted_sum(weight, value) / torch.where(blind, 1.0, total)
    lse = torch.where(blind, -torch.inf, origin + torch.log(torch.where(blind, 1.0, total)))
    order = stride_order(inputs.query)
    back = [order.index(axis) for axis in range(4)]
    out = out.to(problem.dtype).permute(order).contiguous().permute(back)
    return Result(out, lse.squeeze(-1), top.squeeze(-1))


def weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """weight @ value, where a weight of 0 cancels its value even if that is NaN or infinite."""
    finite = value.isfinite()
    if is_wrapped(value) or bool(finite.all()):
        return weight @ value
    seen = (weight > 0).to(weight.dtype) @ (~finite).to(weight.dtype)
    return torch.where(seen > 0, torch.nan, weight @ torch.where(finite, value, 0.0))


def visible_positions(problem: Problem) -> Tensor | None:
    """The mask, broadcastable to [B, Hq, Q, KV]; None: all is visible."""
    if problem.mask_program is None:
        return None
    (visible,), invalid = evaluate(problem.mask_program, index_inputs(problem))
    raise_if_invalid(problem.mask_program, invalid, None)
    return visible.expand(*visible.shape[:-2], problem.q_len, problem.kv_len)


def modified_scores(problem: Problem, score: Tensor, visible: Tensor | None) -> Tensor:
    """Scores after score_mod, -inf where masked; [B, Hq, Q, KV]."""
    if problem.score is not None:
        inputs = {**index_inputs(problem), "score": score}
        (value,), invalid = evaluate(problem.score, inputs)
        raise_if_invalid(problem.score, invalid, visible)
        score = value.expand(score.shape)
    return score if visible is None else torch.where(visible, score, -torch.inf)


def index_inputs(problem: Problem) -> dict[str, Tensor]:
    """The four indices, shaped to broadcast to [B, Hq, Q, KV]."""
    counts = (torch.arange(n, device=problem.device) for n in problem.extents.values())
    return on_grid(*counts)


def _per_query_head(x: Tensor, problem: Problem) -> Tensor:
    return x.expand(problem.batch, -1, -1, -1).repeat_interleave(problem.group, 1)
