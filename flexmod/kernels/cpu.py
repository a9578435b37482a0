"""The `cpu` engine: tiled attention in torch operations over live blocks only.

The default for CPU tensors. It runs on any device, so it also serves what no kernel serves.
FlashAttention-2 order (Dao, 2023): a row of query blocks stays, its runs of key blocks stream
past, statistics are rescaled as the running maximum grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.kernels.problem import Inputs, Problem, Result, new_output
from flexmod.program.evaluate import evaluate, raise_if_invalid

_QUERY_ROWS = 1024  # heads x query rows at a time: scores stay in cache
_KEYS = 1024  # keys at a time
_DENSE_BLOCK = 128

Step = tuple[int, int, bool]  # keys from, to; whether the mask may be skipped


class _Heads(NamedTuple):
    """A slice of batches and query heads that share one row of runs."""

    batches: slice
    heads: slice
    plane: int  # of the block map


def refuses(problem: Problem) -> str | None:
    """It serves everything; see `reference` for gradients."""
    if problem.needs_grad:
        return "it has no backward pass"
    return None


def forward(problem: Problem, inputs: Inputs) -> Result:
    out = new_output(problem, inputs.query)
    shape = (problem.batch, problem.heads, problem.q_len)
    lse = torch.empty(shape, dtype=problem.work_dtype, device=problem.device)
    top = torch.empty_like(lse)
    block = problem.mask.block_size[0] if problem.mask else _DENSE_BLOCK
    for part in _head_slices(problem, block):
        kv_heads = slice(part.heads.start // problem.group, -(-part.heads.stop // problem.group))
        batches = part.batches if inputs.key.shape[0] > 1 else slice(0, 1)
        key, value = (
            x[batches, kv_heads].to(problem.work_dtype) for x in (inputs.key, inputs.value)
        )
        for row, start in enumerate(range(0, problem.q_len, block)):
            rows = slice(start, min(start + block, problem.q_len))
            query = inputs.query[part.batches, part.heads, rows].to(problem.work_dtype)
            steps = _steps(problem, part.plane, row)
            where = (part.batches, part.heads, rows)
            result = _attend_row(problem, query * problem.scale, key, value, where, steps)
            for target, source in zip((out, lse, top), result, strict=True):
                target[part.batches, part.heads, rows] = source
    return Result(out, lse, top)


def _head_slices(problem: Problem, block: int) -> Iterator[_Heads]:
    """Few heads at a time, whole key/value groups where they fit, one map plane each."""
    grid = problem.mask.grid if problem.mask else None
    batch_step = 1 if grid and grid.batch > 1 else problem.batch
    wanted = max(1, _QUERY_ROWS // (block * batch_step))
    head_step = 1 if grid and grid.heads > 1 else _whole_groups(wanted, problem.group)
    for b in range(0, problem.batch, batch_step):
        for h in range(0, problem.heads, head_step):
            plane = (b * grid.heads if grid and grid.batch > 1 else 0) if grid else 0
            plane += h if grid and grid.heads > 1 else 0
            heads = slice(h, min(h + head_step, problem.heads))
            yield _Heads(slice(b, b + batch_step), heads, plane)


def _whole_groups(wanted: int, group: int) -> int:
    """Largest head count near `wanted` that is a multiple of the group."""
    return max(1, wanted // group) * group


def _steps(problem: Problem, plane: int, row: int) -> list[Step]:
    """The key ranges that a row of query blocks visits, none longer than _KEYS."""
    spans: list[Step] = [(0, problem.kv_len, True)]
    if problem.mask is not None:
        grid = problem.mask.grid
        runs = problem.mask.runs.host[plane * grid.rows + row]
        size = grid.block_kv
        spans = [(a * size, min(b * size, problem.kv_len), full) for a, b, full in runs]
    return [
        (start, min(start + _KEYS, stop), full)
        for first, stop, full in spans
        for start in range(first, stop, _KEYS)
    ]


def _attend_row(
    problem: Problem,
    query: Tensor,  # [b, h, rows, E], scaled
    key: Tensor,  # [b | 1, kv heads, KV, E]
    value: Tensor,
    where: tuple[slice, slice, slice],
    steps: list[Step],
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and maximum of one row of query blocks."""
    batch, heads, rows, _ = query.shape
    grouped = (batch, key.shape[1], heads // key.shape[1] * rows)
    query = query.reshape(*grouped, -1)
    top = query.new_full((batch, heads, rows, 1), -torch.inf)
    total = torch.zeros_like(top)
    out = query.new_zeros(*grouped, value.shape[-1])
    for start, stop, full in steps:
        score = query @ key[:, :, start:stop].transpose(-1, -2)
        score = score.view(batch, heads, rows, stop - start)
        score = _modify(problem, score, where, slice(start, stop), full)
        higher = torch.maximum(top, score.amax(-1, keepdim=True))
        origin = torch.where(higher == -torch.inf, 0.0, higher)  # nothing seen so far
        weight = torch.sub(score, origin).exp_()
        rescale = torch.exp(top - origin)
        total = total * rescale + weight.sum(-1, keepdim=True)
        seen = weight.view(*grouped, -1) @ value[:, :, start:stop]
        out = out * rescale.view(*grouped, 1) + seen
        top = higher
    blind = total == 0
    safe = torch.where(blind, 1.0, total)
    out = out.view(batch, heads, rows, -1) / safe
    lse = torch.where(blind, -torch.inf, top + torch.log(safe))
    return out, lse.squeeze(-1), top.squeeze(-1)


def _modify(
    problem: Problem, score: Tensor, where: tuple[slice, slice, slice], keys: slice, full: bool
) -> Tensor:
    """score_mod, then -inf where the mask hides."""
    axes = zip(("b", "h", "q_idx", "kv_idx"), (*where, keys), strict=True)
    inputs = {}
    for axis, (name, span) in enumerate(axes):
        index = torch.arange(span.start, span.stop, device=score.device)
        inputs[name] = index.view([-1] + [1] * (3 - axis))
    visible: Tensor | None = None
    if problem.mask_program is not None and not full:
        (visible,), invalid = evaluate(problem.mask_program, inputs)
        raise_if_invalid(problem.mask_program, invalid, None)
    shape = score.shape
    if problem.score is not None:
        (value,), invalid = evaluate(problem.score, {**inputs, "score": score})
        raise_if_invalid(problem.score, invalid, visible)
        score = value.expand(shape)
    return score if visible is None else torch.where(visible, score, -torch.inf)
