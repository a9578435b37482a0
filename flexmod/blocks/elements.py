"""The kinds of single blocks from their elements: all of them only where a few samples agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from flexmod.blocks.grid import Cells, Grid, spans
from flexmod.blocks.runs import EMPTY, FULL, PARTIAL, Runs, Segments
from flexmod.program import Program
from flexmod.program.evaluate import evaluate, raise_if_invalid

# Of the first and last positions of blocks, and their size: some positions, [places, blocks].
Places = Callable[[Tensor, Tensor, int], Tensor]


def _at_once(device: torch.device) -> int:
    """Elements of one step: what a mask computes stays in cache; a GPU takes fewer steps."""
    return 1 << (20 if device.type == "cuda" else 18)


def look(program: Program, grid: Grid, cells: Cells) -> Tensor:
    """Kinds of blocks, int8; a block cut short by an end is never FULL.

    Args:
        program: the mask, specialized to the grid's extents.
    """
    kind = torch.full(cells.row.shape, PARTIAL, dtype=torch.int8, device=cells.row.device)
    rest = torch.arange(len(kind), device=kind.device)
    for places in _SAMPLES[1:] if kind.is_cuda else _SAMPLES:  # a GPU takes fewer, larger steps
        if not len(rest):
            return kind
        every, some = _in_chunks(program, grid, cells.take(rest), places)
        alike = (every == some).nonzero().flatten()
        rest, every = rest[alike], every[alike]
    kind[rest] = torch.where(every, FULL, EMPTY).to(torch.int8)
    if any(grid.cuts):
        q_first, q_last, kv_first, kv_last = spans(grid, cells, 0)
        short = (q_last - q_first < grid.block_q - 1) | (kv_last - kv_first < grid.block_kv - 1)
        kind[short & (kind == FULL)] = PARTIAL
    return kind


def count_visible(program: Program, grid: Grid, runs: Runs) -> int:
    """How many elements are visible over all planes; full blocks are not evaluated."""
    row, start, stop, kind = runs.segments()
    full = int(((stop - start) * (kind == FULL)).sum()) * grid.block_q * grid.block_kv
    partial = Segments(row, start, stop, kind).take((kind == PARTIAL).nonzero().flatten()).blocks()
    step = max(1, _at_once(row.device) // (grid.block_q * grid.block_kv))
    for first in range(0, len(partial.row), step):
        row, column = partial.row[first : first + step], partial.start[first : first + step]
        cells = Cells(row // grid.rows, row % grid.rows, column)
        full += int(_visible(program, grid, cells, _all, distinct=True).sum())
    return full


def _begin(count: int, first: Tensor, last: Tensor) -> Tensor:
    steps = torch.arange(count, device=first.device, dtype=first.dtype)[:, None]
    return torch.minimum(first + steps, last)


def _corners(first: Tensor, last: Tensor, size: int) -> Tensor:
    """Two neighbours: an edge that runs through a block often shows between them."""
    return _begin(2, first, last)


def _ends_and_middle(first: Tensor, last: Tensor, size: int) -> Tensor:
    near, far = torch.minimum(first + 1, last), torch.maximum(last - 1, first)
    return torch.stack([first, near, (first + last) // 2, far, last])


def _both_ends(first: Tensor, last: Tensor, size: int) -> Tensor:
    """Eight at either end: small corners of a mask that reach into a block."""
    return torch.cat([_begin(8, first, last), -_begin(8, -last, -first)])


def _all(first: Tensor, last: Tensor, size: int) -> Tensor:
    return _begin(size, first, last)


_SAMPLES = (_corners, _ends_and_middle, _both_ends, _all)


def _in_chunks(program: Program, grid: Grid, cells: Cells, places: Places) -> tuple[Tensor, Tensor]:
    """Whether all and whether any of the elements at the given places are visible; bool [cells]."""
    one = torch.zeros(1, device="cpu")
    each = len(places(one, one, grid.block_q)) * len(places(one, one, grid.block_kv))
    step = max(1, _at_once(cells.row.device) // each)
    count = len(cells.row)
    found = [
        _all_and_any(program, grid, cells.take(slice(n, n + step)), places)
        for n in range(0, count, step)
    ]
    every, some = zip(*found, strict=True)
    return torch.cat(every), torch.cat(some)


def _visible(
    program: Program, grid: Grid, cells: Cells, places: Places, distinct: bool = False
) -> Tensor:
    """The mask at places of each block, bool [q places, kv places, cells].

    Places past the end of a sequence repeat its last one; with distinct=True they are False.
    """
    q_first, q_last, kv_first, kv_last = spans(grid, cells, 0)
    q = places(q_first, q_last, grid.block_q)
    kv = places(kv_first, kv_last, grid.block_kv)
    b, h = cells.batch_and_head(grid)
    inputs = {"b": b, "h": h, "q_idx": q[:, None], "kv_idx": kv[None]}
    (visible,), invalid = evaluate(program, inputs)
    raise_if_invalid(program, invalid, None)
    visible = visible.expand(len(q), len(kv), len(b))
    if distinct and any(grid.cuts):
        fresh_q, fresh_kv = (torch.ones_like(x, dtype=torch.bool) for x in (q, kv))
        fresh_q[1:], fresh_kv[1:] = q[1:] != q[:-1], kv[1:] != kv[:-1]
        visible = visible & fresh_q[:, None] & fresh_kv
    return visible


def _all_and_any(
    program: Program, grid: Grid, cells: Cells, places: Places
) -> tuple[Tensor, Tensor]:
    lines = _visible(program, grid, cells, places).flatten(0, 1)
    if len(lines) > 64 or lines.is_cuda:
        return lines.all(0), lines.any(0)
    # Few long lines on a CPU: one pass each is faster than a reduction over a short axis.
    return reduce(torch.logical_and, lines.unbind()), reduce(torch.logical_or, lines.unbind())
