"""From a mask program to runs: row by row, or coarse to fine; elements only where both are open.

Masks whose comparisons change a few times along a row are decided by `by_rows`. For any other,
large squares of blocks are decided on intervals, and undecided ones are split in four, so that the
cost follows the boundary of the mask, not its area.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.blocks.by_rows import segments_by_row
from flexmod.blocks.elements import look
from flexmod.blocks.grid import Cells, Grid, cut_short, quarters, whole_grid
from flexmod.blocks.overlay import live
from flexmod.blocks.ranges import MaskRanges
from flexmod.blocks.runs import DOUBT, EMPTY, FULL, PARTIAL, Runs, Segments
from flexmod.program import Program


class _Sizes(NamedTuple):
    """How much is done in one step. A GPU is given more at once: there, each step costs time."""

    first: int  # squares of the coarsest level at most: as many cost as little as one
    at_once: int  # squares whose intervals are held at a time, so that they stay in cache


_SIZES = {"cuda": _Sizes(1 << 18, 1 << 18)}
_CPU = _Sizes(1 << 12, 1 << 16)


def classify(program: Program, grid: Grid, device: torch.device) -> Runs:
    """Runs of partial and full blocks of a mask over a grid."""
    rows = grid.planes * grid.rows
    if not (rows and grid.columns):
        return Runs.nothing(rows, device)
    ranges = MaskRanges(program, grid)
    segments = segments_by_row(ranges, device)
    if segments is None:
        return Runs.from_segments(_coarse_to_fine(ranges, device), rows, grid.columns)
    asked = (segments.kind == DOUBT).nonzero().flatten()
    if not len(asked):
        return Runs.from_sorted(segments, rows)
    return _looked_at(ranges, segments, asked)


def settle(program: Program, grid: Grid, segments: Segments) -> Runs:
    """Runs from segments of which some have the kind DOUBT: only those are looked at."""
    asked = (segments.kind == DOUBT).nonzero().flatten()
    if not len(asked):
        return Runs.from_segments(segments, grid.planes * grid.rows, grid.columns)
    return _looked_at(MaskRanges(program, grid), segments, asked, by_ranges=True)


def _looked_at(
    ranges: MaskRanges, segments: Segments, asked: Tensor, by_ranges: bool = False
) -> Runs:
    """The blocks of some segments by their ranges, if that may decide them, and elements."""
    grid = ranges.grid
    row, start, stop, _ = segments.take(asked).blocks()
    cells = Cells(*(x.to(grid.index_dtype) for x in (row // grid.rows, row % grid.rows, start)))
    if by_ranges:
        kind = _decide(ranges, grid, cells, 0)
        undecided = (kind == DOUBT).nonzero().flatten()
        kind[undecided] = look(ranges.program, grid, cells.take(undecided))
    else:
        kind = look(ranges.program, grid, cells)
    others = segments.take((segments.kind != DOUBT).nonzero().flatten())
    decided = live(Segments(row, start, stop, kind))
    both = Segments(*(torch.cat(pair) for pair in zip(others, decided, strict=True)))
    return Runs.from_segments(both, grid.planes * grid.rows, grid.columns)


def _coarse_to_fine(ranges: MaskRanges, device: torch.device) -> Segments:
    """Live segments in any order; squares that are undecided are split in four."""
    grid = ranges.grid
    level = _coarsest(grid, _SIZES.get(device.type, _CPU).first)
    cells = whole_grid(grid, level, device)
    found: list[Segments] = []
    while True:
        kind = _decide(ranges, grid, cells, level)
        undecided = (kind == DOUBT).nonzero().flatten()
        if level == 0:
            kind[undecided] = look(ranges.program, grid, cells.take(undecided))
        seen = ((kind == PARTIAL) | (kind == FULL)).nonzero().flatten()
        found.append(_segments(grid, cells.take(seen), kind[seen], level))
        if level == 0 or not len(undecided):
            return Segments(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        level -= 1
        cells = quarters(grid, cells.take(undecided), level)


def _coarsest(grid: Grid, most: int) -> int:
    level = 0
    while True:
        rows, columns = grid.side(level)
        if grid.planes * rows * columns <= most or rows == columns == 1:
            return level
        level += 1


def _decide(ranges: MaskRanges, grid: Grid, cells: Cells, level: int) -> Tensor:
    """EMPTY, PARTIAL, FULL or DOUBT for each square, int8.

    A square with blocks that an end cuts short is never FULL; such a block is PARTIAL.
    """
    kinds = []
    step = _SIZES.get(cells.row.device.type, _CPU).at_once
    for first in range(0, len(cells.row), step):
        part = cells.take(slice(first, first + step))
        every, some = ranges(part, level)
        kind = torch.where(some, DOUBT, EMPTY).to(torch.int8)
        kind.masked_fill_(every, FULL)
        short = cut_short(grid, part, level)
        if short is not None:
            kind.masked_fill_(every & short, PARTIAL if level == 0 else DOUBT)
        kinds.append(kind)
    return torch.cat(kinds) if kinds else torch.zeros(0, dtype=torch.int8, device=cells.row.device)


def _segments(grid: Grid, cells: Cells, kind: Tensor, level: int) -> Segments:
    """One segment for each row of blocks that neighbouring squares of one kind cover."""
    row = cells.plane * grid.side(level)[0] + cells.row
    squares = Segments(row, cells.column, cells.column + 1, kind)
    if level or not kind.is_cuda:  # fewer to sort, but a GPU waits for their number
        squares = squares.joined()
    if not level:
        return squares
    high = 1 << level
    plane, row = squares.row // grid.side(level)[0], squares.row % grid.side(level)[0]
    row = (
        (row * high)[:, None] + torch.arange(high, device=kind.device, dtype=row.dtype)
    ).flatten()
    start, stop = squares.start * high, (squares.stop * high).clamp(max=grid.columns)
    rest = (x.repeat_interleave(high) for x in (plane * grid.rows, start, stop, squares.kind))
    base, start, stop, kind = rest
    segments = Segments(base + row, start, stop, kind)
    if grid.rows % high == 0:
        return segments
    return segments.take((row < grid.rows).nonzero().flatten())
