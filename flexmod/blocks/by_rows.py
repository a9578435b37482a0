"""A mask row by row: where its comparisons change along a row of blocks, nothing between.

The answer of a mask about neighbouring blocks of a row differs only where one of its comparisons
does. If each compares sums of a part of the query and a part of the key that rises or falls, these
places are found by bisection, and the mask is decided once for each segment between two of them.
A segment in which exactly one comparison is open, and surely has both answers, is partial. So a
map of causal attention, of windows, of prefixes or of sorted documents takes a fixed number of
passes over the rows, at any length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks.atoms import Truth
from flexmod.blocks.grid import Grid
from flexmod.blocks.ranges import MaskRanges
from flexmod.blocks.runs import DOUBT, EMPTY, FULL, PARTIAL, Segments
from flexmod.blocks.separate import Separated
from flexmod.blocks.sums import NotSeparable
from flexmod.program import Program
from flexmod.program.intervals import Interval
from flexmod.program.ir import Instruction, interpret
from flexmod.program.ops import TABLE


def segments_by_row(ranges: MaskRanges, device: torch.device) -> Segments | None:
    """Live segments, by row and column, some of the kind DOUBT; None: the mask is not like that."""
    try:
        lines = Separated(ranges, device)
    except NotSeparable:
        return None
    grid, atoms = ranges.grid, lines.atoms
    ends = [0, grid.columns, *([grid.columns - 1] if grid.cuts[1] else [])]
    edges = [torch.full((1, 1), end, dtype=torch.int32, device=device) for end in ends]
    edges += [step.at for atom in atoms.values() for step in atom.steps]
    size = (grid.planes, grid.rows)
    edge = torch.stack([x.expand(size) for x in edges], -1).sort(-1).values
    start, stop = edge[..., :-1], edge[..., 1:]
    truths = {line: atom.at(start) for line, atom in atoms.items()}
    kind = _kinds(ranges.program, lines, truths, _cut_short(grid, start))
    live = ((kind != EMPTY) & (start < stop)).flatten().nonzero().flatten()
    row = live // start.shape[-1]
    return Segments(row, *(x.flatten().index_select(0, live) for x in (start, stop, kind)))


def _kinds(
    program: Program, lines: Separated, truths: dict[Instruction, Truth], short: Tensor | None
) -> Tensor:
    """The kind of each segment, by what is known of the comparisons."""

    def bounds(line: Instruction, args: tuple[Any, ...]) -> Interval | None:
        if line in truths:
            return Interval(*truths[line][:2])
        return lines.ranges.apply(line, args) if line.dtype == torch.bool else None

    every, some = _result(program, bounds)
    mixed = _surely_mixed(program, truths)
    if lines.only_whole and short is not None:
        mixed = mixed & ~short
    kind = torch.where(some, torch.where(mixed, PARTIAL, DOUBT), EMPTY)
    full = FULL if short is None else torch.where(short, PARTIAL, FULL)
    return torch.where(every, full, kind)


def _surely_mixed(program: Program, truths: dict[Instruction, Truth]) -> Tensor:
    """Where one comparison alone is open and has both answers, and the mask follows it."""
    both = {line: torch.stack([truth.every, truth.some]) for line, truth in truths.items()}

    def plain(line: Instruction, args: tuple[Any, ...]) -> Tensor | None:
        if line in both:
            return both[line]
        return TABLE[line.op].evaluate(*args) if line.dtype == torch.bool else None

    first, second = _result(program, plain)
    mixed = reduce(torch.logical_or, (truth.mixed for truth in truths.values()))
    open_ones = [(truth.some & ~truth.every).int() for truth in truths.values()]
    return mixed & (first != second) & (reduce(torch.add, open_ones) == 1)


def _result(program: Program, rule: Callable[[Instruction, tuple[Any, ...]], Any]) -> Any:
    """A mask from its comparisons."""
    lines = interpret(program, lambda _, line, args: rule(line, args), rule)
    return lines[program.outputs[0]]


def _cut_short(grid: Grid, start: Tensor) -> Tensor | None:
    """Which segments lie in the last row or column, if an end cuts its blocks short."""
    cut_row, cut_column = grid.cuts
    row = torch.arange(grid.rows, device=start.device)[:, None] == grid.rows - 1
    column = start == grid.columns - 1
    if cut_row and cut_column:
        return row | column
    return row if cut_row else column if cut_column else None
