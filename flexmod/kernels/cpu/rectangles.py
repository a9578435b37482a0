"""Rectangles of full blocks, left to torch's own attention kernels for the CPU.

What neighbouring rows of blocks all see whole is attention without a mask. torch has kernels for that
which keep scores in a core's cache; products and passes of torch operations take half as long again.
Results over disjoint keys merge by their lse, and the backward of a part, given out and lse of the
whole, is its share of the gradients (FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.blocks.grid import Grid
from flexmod.kernels.cpu import walk
from flexmod.kernels.problem import Inputs, Problem, Saved

_LEAST = 1 << 18  # pairs of a rectangle: smaller ones gain nothing
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Span = tuple[int, int]


class Parts(NamedTuple):
    """What torch's kernels do, and what is left for tiles: a list of runs each row of blocks."""

    rectangles: list[walk.Row]
    grid: Grid
    rest: list[list[walk.Run]]


class Partial(NamedTuple):
    """Attention to some of the keys: out [B, Hq, Q, Ev] and lse [B, Hq, Q], 0 and -inf of none."""

    out: Tensor
    lse: Tensor

    def at(self, row: walk.Row) -> Partial:
        return Partial(self.out[row.queries], self.lse[row.queries])


def parts(problem: Problem, inputs: Inputs, wanted: bool) -> Parts:
    """A call cut in two. `inputs` are in the working precision."""
    grid, runs = walk.grid_of(problem)
    plain = problem.score is None and not problem.dropout_p and problem.device.type == "cpu"
    if not wanted or not plain or problem.head_dim != problem.value_dim:
        return Parts([], grid, runs)
    least = -(-_LEAST // (grid.block_q * grid.block_kv))
    found = Parts([], grid, [])
    for plane in range(grid.planes):
        cut_here = cut(runs[plane * grid.rows : (plane + 1) * grid.rows], least)
        found.rest.extend(cut_here.rest)
        found.rectangles.extend(
            _row(problem, inputs, grid, plane, each) for each in cut_here.rectangles
        )
    if found.rectangles and not _scores_are_finite(problem, inputs):
        return Parts([], grid, runs)
    return found


def _row(
    problem: Problem, inputs: Inputs, grid: Grid, plane: int, blocks: tuple[int, int, int, int]
) -> walk.Row:
    first, last, start, stop = blocks
    b, h = divmod(plane, grid.heads)
    batches = slice(b, b + 1) if grid.batch > 1 else slice(0, problem.batch)
    heads = slice(h, h + 1) if grid.heads > 1 else slice(0, problem.heads)
    rows = slice(first * grid.block_q, min(last * grid.block_q, grid.q_len))
    keys = walk.Keys(start * grid.block_kv, min(stop * grid.block_kv, grid.kv_len), True)
    return walk.row_of(problem, inputs, batches, heads, rows, [keys])


def _scores_are_finite(problem: Problem, inputs: Inputs) -> bool:
    """Whether no score can be infinite or NaN; what torch's kernels make of those is another
    matter than what they mean here."""
    largest = [max(-float(low), float(high)) for low, high in map(torch.aminmax, inputs)]
    query, key, value = largest
    bound = query * key * problem.head_dim * max(1.0, abs(problem.scale))
    return bound < torch.finfo(problem.work_dtype).max and math.isfinite(value)


def forward(problem: Problem, rectangles: list[walk.Row], inputs: Inputs) -> Partial:
    """Attention to the keys of rectangles."""
    shape = inputs.query.shape
    found = Partial(inputs.query.new_zeros(shape), inputs.query.new_full(shape[:3], -torch.inf))
    inputs = Inputs(*map(_in_rows, inputs))
    for row in rectangles:
        target = found.at(row)
        out, lse = _kernel(*_grouped(row, inputs), scale=problem.scale)
        part = Partial(out.reshape(target.out.shape), lse.reshape(target.lse.shape))
        for x, new in zip(target, merged(target, part), strict=True):
            x.copy_(new)
    return found


def merged(one: Partial, other: Partial) -> Partial:
    """Attention to the keys of both, which have none in common."""
    weight = torch.sigmoid(other.lse - one.lse)
    weight = torch.where(other.lse == -torch.inf, 0.0, weight)  # also where both see nothing
    out = torch.lerp(one.out, other.out, weight.unsqueeze(-1))
    return Partial(out, torch.logaddexp(one.lse, other.lse))


def backward(
    problem: Problem, rectangles: list[walk.Row], inputs: Inputs, saved: Saved, grads: Inputs
) -> None:
    """Add the rectangles' share to the gradients of query, key and value."""
    inputs = Inputs(*map(_in_rows, inputs))
    saved = saved._replace(out=_in_rows(saved.out))
    for row in rectangles:
        query, key, value = _grouped(row, inputs)
        d_out, out, lse = (
            x[row.queries].reshape(*query.shape[:3], *x.shape[3:])
            for x in (saved.d_out, saved.out, saved.lse)
        )
        d_query, d_key, d_value = _kernel_backward(
            d_out, query, key, value, out, lse, 0.0, False, scale=problem.scale
        )
        target = grads.query[row.queries]
        target += d_query.reshape(target.shape)
        (keys,) = row.steps
        for total, part in ((grads.key, d_key), (grads.value, d_value)):
            walk.add(total[row.keys][:, :, keys.span], part)


def _in_rows(x: Tensor) -> Tensor:
    """Memory that torch's kernels can read: the numbers of a row side by side, no rows overlap."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _grouped(row: walk.Row, inputs: Inputs) -> Inputs:
    """The tensors of a rectangle; heads of a group lie side by side, as more rows of their keys."""
    (keys,) = row.steps
    query, key, value = inputs.query[row.queries], inputs.key[row.keys], inputs.value[row.keys]
    batch, _, _, dim = query.shape
    query = query.reshape(batch, key.shape[1], -1, dim)
    key, value = (x[:, :, keys.span].expand(batch, -1, -1, -1) for x in (key, value))
    return Inputs(query, key, value)


class Cut(NamedTuple):
    """Rectangles (first row, past the last, first column, past the last), and what they leave."""

    rectangles: list[tuple[int, int, int, int]]
    rest: list[list[walk.Run]]


def cut(rows: list[list[walk.Run]], least: int) -> Cut:
    """Rectangles of at least so many full blocks.

    Rows are halved again and again: what all rows of a part see whole is a rectangle, if its parent
    did not have it. Of a causal map that makes one large square, two of half its side, and so on.
    """
    found = Cut([], [list(row) for row in rows])
    parts = [(0, len(rows))]
    while parts:
        first, last = parts.pop()
        for start, stop in _common(found.rest[first:last], least):
            found.rectangles.append((first, last, start, stop))
            for row in range(first, last):
                found.rest[row] = _without(found.rest[row], start, stop)
        if last - first > 1:
            middle = (first + last) // 2
            parts += [(first, middle), (middle, last)]
    return found


def _common(rows: list[list[walk.Run]], least: int) -> list[Span]:
    """Columns that are full in all rows, where that makes `least` blocks and more."""
    width = -(-least // len(rows))
    spans = [(start, stop) for start, stop, full in rows[0] if full and stop - start >= width]
    for row in rows[1:]:
        if not spans:
            break
        spans = [
            (max(a, c), min(b, d))
            for a, b in spans
            for c, d, full in row
            if full and min(b, d) - max(a, c) >= width
        ]
    return spans


def _without(row: list[walk.Run], start: int, stop: int) -> list[walk.Run]:
    """The runs of a row without the columns from start to stop, which lie in one of them."""
    left: list[walk.Run] = []
    for a, b, full in row:
        if a <= start and stop <= b:
            left += [(c, d, full) for c, d in ((a, start), (stop, b)) if c < d]
        else:
            left.append((a, b, full))
    return left
