"""From a mask program to runs, coarse to fine.

Large squares of blocks are decided on intervals; undecided ones are split in four. Only blocks
that stay undecided at the finest level are looked at element by element, and of those only the
ones whose sampled elements all agree. The cost follows the boundary of the mask, not its area.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.blocks.runs import EMPTY, FULL, PARTIAL, Pieces, Runs
from flexmod.program import Program
from flexmod.program.bounds import LoadRule, bounds, table_ranges
from flexmod.program.evaluate import evaluate, raise_if_invalid
from flexmod.program.intervals import Interval
from flexmod.program.specialize import specialize

_ELEMENTS_AT_ONCE = 1 << 22
_UNDECIDED = -1


class Grid(NamedTuple):
    """Extents of a map: planes (batch, head), elements, and block sizes."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def rows(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def planes(self) -> int:
        return self.batch * self.heads


class _Cells(NamedTuple):
    """Squares of 2**level blocks a side: int64 tensors of one length."""

    plane: Tensor
    row: Tensor
    column: Tensor


def classify(program: Program, grid: Grid, device: torch.device) -> Runs:
    """Runs of partial and full blocks of a mask over a grid."""
    load = table_ranges(program)
    level = max(grid.rows - 1, grid.columns - 1, 0).bit_length()
    zeros = torch.zeros(grid.planes, dtype=torch.long, device=device)
    cells = _Cells(torch.arange(grid.planes, device=device), zeros, zeros)
    found: list[Pieces] = []
    while len(cells.plane) and grid.rows and grid.columns:
        kind = _decide(program, grid, cells, level, load)
        if level == 0:
            open_ = kind == _UNDECIDED
            kind[open_] = _look(program, grid, _Cells(*(c[open_] for c in cells)))
        live = kind > EMPTY
        found.append(_pieces(grid, _Cells(*(c[live] for c in cells)), kind[live], level))
        if level == 0:
            break
        open_ = kind == _UNDECIDED
        level -= 1
        cells = _split(grid, _Cells(*(c[open_] for c in cells)), level)
    pieces = Pieces(*(torch.cat(parts) for parts in zip(*found, strict=True))) if found else None
    if pieces is None:
        pieces = Pieces(zeros[:0], zeros[:0], zeros[:0], zeros[:0])
    return Runs.from_pieces(pieces, grid.planes * grid.rows, grid.columns)


def _spans(grid: Grid, cells: _Cells, level: int) -> tuple[Interval, Interval]:
    """Inclusive ranges of q_idx and kv_idx of cells."""
    q = cells.row * (grid.block_q << level)
    kv = cells.column * (grid.block_kv << level)
    q_end = (q + (grid.block_q << level)).clamp(max=grid.q_len) - 1
    kv_end = (kv + (grid.block_kv << level)).clamp(max=grid.kv_len) - 1
    return Interval(q, q_end), Interval(kv, kv_end)


def _decide(program: Program, grid: Grid, cells: _Cells, level: int, load: LoadRule) -> Tensor:
    """EMPTY, FULL or _UNDECIDED for each cell; a block cut short by an end is never FULL."""
    b, h = cells.plane // grid.heads, cells.plane % grid.heads
    q, kv = _spans(grid, cells, level)
    ranges = {"b": Interval(b, b), "h": Interval(h, h), "q_idx": q, "kv_idx": kv}
    result = bounds(program, ranges, load)[-1]
    shape = cells.plane.shape
    all_visible, any_visible = (result.lo == 1).expand(shape), (result.hi == 1).expand(shape)
    kind = torch.full_like(cells.plane, _UNDECIDED)
    kind[~any_visible] = EMPTY
    cut_q, cut_kv = grid.q_len % grid.block_q != 0, grid.kv_len % grid.block_kv != 0
    cut = (cut_q & (q.hi == grid.q_len - 1)) | (cut_kv & (kv.hi == grid.kv_len - 1))
    kind[all_visible & ~cut] = FULL
    if level == 0:
        kind[all_visible & cut] = PARTIAL
    return kind


def _look(program: Program, grid: Grid, cells: _Cells) -> Tensor:
    """The kinds of single blocks, from their elements: a few samples first, then all."""
    q, kv = _spans(grid, cells, 0)
    some_q = torch.stack([q.lo, q.lo + 1, (q.lo + q.hi) // 2, q.hi - 1, q.hi], 1)
    some_kv = torch.stack([kv.lo, kv.lo + 1, (kv.lo + kv.hi) // 2, kv.hi - 1, kv.hi], 1)
    some_q = torch.maximum(torch.minimum(some_q, q.hi[:, None]), q.lo[:, None])
    some_kv = torch.maximum(torch.minimum(some_kv, kv.hi[:, None]), kv.lo[:, None])
    any_visible, all_visible = _any_all(program, grid, cells, some_q, some_kv)
    kind = torch.full_like(cells.plane, PARTIAL)
    rest = (any_visible == all_visible).nonzero().flatten()
    at_once = max(1, _ELEMENTS_AT_ONCE // (grid.block_q * grid.block_kv))
    steps_q = torch.arange(grid.block_q, device=kind.device)
    steps_kv = torch.arange(grid.block_kv, device=kind.device)
    for chunk in rest.split(at_once):
        part = _Cells(*(c[chunk] for c in cells))
        every_q = torch.minimum(q.lo[chunk, None] + steps_q, q.hi[chunk, None])
        every_kv = torch.minimum(kv.lo[chunk, None] + steps_kv, kv.hi[chunk, None])
        any_visible, all_visible = _any_all(program, grid, part, every_q, every_kv)
        short = (q.hi - q.lo + 1)[chunk] < grid.block_q
        short = short | ((kv.hi - kv.lo + 1)[chunk] < grid.block_kv)
        full_or_cut = torch.where(short, PARTIAL, FULL)
        kind[chunk] = torch.where(
            all_visible, full_or_cut, torch.where(any_visible, PARTIAL, EMPTY)
        )
    return kind


def _any_all(
    program: Program, grid: Grid, cells: _Cells, q: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether any and whether all of the elements q x kv of each cell are visible."""
    extents = {"b": grid.batch, "h": grid.heads, "q_idx": grid.q_len, "kv_idx": grid.kv_len}
    narrow = specialize(program, extents)
    inputs = {
        "b": (cells.plane // grid.heads)[:, None, None],
        "h": (cells.plane % grid.heads)[:, None, None],
        "q_idx": q[:, :, None],
        "kv_idx": kv[:, None, :],
    }
    (visible,), invalid = evaluate(narrow, inputs)
    raise_if_invalid(narrow, invalid, None)
    shape = (len(cells.plane), q.shape[1], kv.shape[1])
    flat = visible.expand(shape).flatten(1)
    return flat.any(1), flat.all(1)


def _pieces(grid: Grid, cells: _Cells, kind: Tensor, level: int) -> Pieces:
    """One piece for each row of blocks that a cell covers."""
    first = cells.row << level
    heights = ((cells.row + 1) << level).clamp(max=grid.rows) - first
    within = torch.arange(int(heights.sum()), device=first.device)
    within = within - (heights.cumsum(0) - heights).repeat_interleave(heights)
    row = (cells.plane * grid.rows + first).repeat_interleave(heights) + within
    start = (cells.column << level).repeat_interleave(heights)
    stop = ((cells.column + 1) << level).clamp(max=grid.columns).repeat_interleave(heights)
    return Pieces(row, start, stop, kind.repeat_interleave(heights))


def _split(grid: Grid, cells: _Cells, level: int) -> _Cells:
    """The four quarters of each cell, at the finer `level`, that lie inside the grid."""
    quarter = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], device=cells.row.device)
    row = (cells.row[:, None] * 2 + quarter[:, 0]).flatten()
    column = (cells.column[:, None] * 2 + quarter[:, 1]).flatten()
    plane = cells.plane.repeat_interleave(4)
    inside = ((row << level) < grid.rows) & ((column << level) < grid.columns)
    return _Cells(plane[inside], row[inside], column[inside])
