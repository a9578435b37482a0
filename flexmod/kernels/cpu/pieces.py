"""A map cut into few large pieces: rectangles of full blocks, and strips of what they leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexmod.blocks.grid import Grid
from flexmod.kernels.cpu import walk
from flexmod.kernels.problem import Inputs, Problem

_RECTANGLE = 1 << 16  # pairs of a rectangle, or more
_STRIP = 1 << 19  # pairs of a strip, or less: its mask is written out
Span = tuple[int, int]  # first, one past the last


class Blocks(NamedTuple):
    """A rectangle of full blocks."""

    rows: Span
    columns: Span


def pieces(problem: Problem, inputs: Inputs) -> Iterator[walk.Row]:
    """All pieces of a call, each with neighbouring steps over its keys.

    A rectangle has many rows of blocks and one full step, a strip has one row of blocks.
    """
    grid, runs = walk.grid_of(problem)
    least = -(-_RECTANGLE // (grid.block_q * grid.block_kv))
    for plane in range(grid.planes):
        b, h = divmod(plane, grid.heads)
        batches = slice(b, b + 1) if grid.batch > 1 else slice(0, problem.batch)
        heads = slice(h, h + 1) if grid.heads > 1 else slice(0, problem.heads)
        found, rest = rectangles(runs[plane * grid.rows : (plane + 1) * grid.rows], least)
        for (first, last), (start, stop) in found:
            rows = walk.span(first, last, grid.block_q, grid.q_len)
            keys = walk.span(start, stop, grid.block_kv, grid.kv_len)
            steps = [walk.Keys(keys.start, keys.stop, True)]
            yield walk.row_of(problem, inputs, batches, heads, rows, steps)
        for row, left in enumerate(rest):
            rows = walk.span(row, row + 1, grid.block_q, grid.q_len)
            for steps in _strips(grid, left):
                yield walk.row_of(problem, inputs, batches, heads, rows, steps)


def rectangles(
    rows: Sequence[Sequence[walk.Run]], least: int
) -> tuple[list[Blocks], list[list[walk.Run]]]:
    """Rectangles of at least so many full blocks, and the runs that they leave of each row.

    Rows are halved again and again: what all rows of a part see whole is a rectangle, where no part
    around it had it. Of a causal map that makes a square of half its side, two of a quarter, and
    so on.
    """
    found, rest = [], [list(row) for row in rows]
    parts = [(0, len(rows))]
    while parts:
        first, last = parts.pop()
        for columns in _common(rest[first:last], least):
            found.append(Blocks((first, last), columns))
            for row in range(first, last):
                rest[row] = _without(rest[row], *columns)
        if last - first > 1:
            middle = (first + last) // 2
            parts += [(first, middle), (middle, last)]
    return found, rest


def _common(rows: list[list[walk.Run]], least: int) -> list[Span]:
    """Columns that are full in all rows, where they make `least` blocks and more."""
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
    left = []
    for first, last, full in row:
        if first <= start and stop <= last:
            left += [(a, b, full) for a, b in ((first, start), (stop, last)) if a < b]
        else:
            left.append((first, last, full))
    return left


def _strips(grid: Grid, runs: Sequence[walk.Run]) -> Iterator[list[walk.Keys]]:
    """Steps of neighbouring keys, as long as they make no more than _STRIP pairs."""
    strip: list[walk.Keys] = []
    for keys in walk.steps(grid, runs):
        wide = strip and (keys.stop - strip[0].start) * grid.block_q > _STRIP
        if strip and (wide or keys.start != strip[-1].stop):
            yield strip
            strip = []
        strip.append(keys)
    if strip:
        yield strip
