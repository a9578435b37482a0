"""Maps combined: & | - ~ and concatenation, on runs; only blocks in doubt are looked at."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmod.blocks.classify import settle
from flexmod.blocks.cut import doubtful_edges
from flexmod.blocks.grid import Grid
from flexmod.blocks.overlay import combine, shared
from flexmod.blocks.rewrite import Indices, joined, within
from flexmod.blocks.runs import DOUBT, EMPTY, FULL, PARTIAL, Runs, Segments
from flexmod.errors import BlockMaskError, DeviceError
from flexmod.program import Program
from flexmod.program.ir import INDICES

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask

# The kind of a block from its kinds in two maps. Two partial blocks may meet, or miss each other.
_AND = [[EMPTY, EMPTY, EMPTY], [EMPTY, DOUBT, PARTIAL], [EMPTY, PARTIAL, FULL]]
_OR = [[EMPTY, PARTIAL, FULL], [PARTIAL, DOUBT, FULL], [FULL, FULL, FULL]]
_MINUS = [[EMPTY, EMPTY, EMPTY], [PARTIAL, DOUBT, EMPTY], [FULL, PARTIAL, EMPTY]]
# Against a map in which every block is PARTIAL, so that its column is the answer.
_NOT = [[EMPTY, FULL, EMPTY], [EMPTY, PARTIAL, EMPTY], [EMPTY, EMPTY, EMPTY]]


def intersection(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a & b`: visible in both."""
    return _combined("and", mask, other, operator.and_, _AND)


def union(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a | b`: visible in at least one."""
    return _combined("or", mask, other, operator.or_, _OR)


def difference(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a - b`: visible in a and hidden in b."""
    return _combined("minus", mask, other, lambda x, y: x & ~y, _MINUS)


def complement(mask: BlockMask) -> BlockMask:
    """`~a`: visible where a is hidden."""
    mask.check_unchanged()
    grid, inner = mask.grid, mask.program
    program = joined(f"not {inner.name}", (inner,), mask.device, lambda at, call: ~call(inner, at))
    each = torch.arange(grid.planes * grid.rows, dtype=torch.int32, device=mask.device)
    table = torch.tensor([[0, grid.columns, PARTIAL]], dtype=torch.int32, device=mask.device)
    everything = Runs(torch.stack([each * 0, each * 0 + 1], 1), table)
    segments = combine(mask.runs, everything, grid.columns, _kinds(_NOT, mask.device))
    # A block that an end cuts short is PARTIAL even if all of it is visible.
    runs = settle(program, grid, doubtful_edges(segments, grid, *grid.cuts))
    return replace(mask, program=program, runs=shared(runs, grid.planes))


def _combined(
    name: str,
    mask: BlockMask,
    other: BlockMask,
    join: Callable[[Any, Any], Any],
    kinds: list[list[int]],
) -> BlockMask:
    if not isinstance(other, type(mask)):
        return NotImplemented
    mask.check_unchanged()
    other.check_unchanged()
    shape = _common_shape(mask, other)
    other = other.regrid(mask.block_size)
    first, second = mask.program, other.program
    program = joined(
        f"({first.name} {name} {second.name})",
        (first, second),
        mask.device,
        lambda at, call: join(call(first, at), call(second, at)),
    )
    grid = Grid.of(program, shape, mask.block_size)
    mine, theirs = (_spread(m, grid.batch, grid.heads) for m in (mask, other))
    segments = combine(mine, theirs, grid.columns, _kinds(kinds, mask.device))
    runs = shared(settle(program, grid, segments), grid.planes)
    return replace(mask, shape=shape, program=program, runs=runs)


def _kinds(table: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(table, device=device)


def _common_shape(mask: BlockMask, other: BlockMask) -> tuple[int, int, int, int]:
    if mask.device != other.device:
        raise DeviceError(f"the maps are on {mask.device} and {other.device}: use .to(...)")
    if mask.shape[2:] != other.shape[2:]:
        raise BlockMaskError(
            f"maps of Q_LEN, KV_LEN = {mask.shape[2:]} and {other.shape[2:]} don't combine: "
            "crop or pad one of them"
        )
    planes = []
    for axis, index in enumerate(("b", "h")):
        a, b = mask.shape[axis], other.shape[axis]
        small = mask if a == 1 else other
        if a != b and (1 not in (a, b) or index in small.program.reads):
            raise BlockMaskError(f"maps of {'BH'[axis]} = {a} and {b} don't combine")
        planes.append(b if a == 1 else a)
    return (*planes, *mask.shape[2:])  # type: ignore[return-value]


def _spread(mask: BlockMask, batch: int, heads: int) -> Runs:
    """The runs of a map for more planes, which share them."""
    grid = mask.grid
    spans = mask.runs.spans.view(grid.batch, grid.heads, grid.rows, 2)
    spans = spans.expand(batch, heads, grid.rows, 2)
    return Runs(spans.reshape(-1, 2), mask.runs.table)


def concat(maps: Sequence[BlockMask], axis: str = "q_idx") -> BlockMask:
    """Maps one after the other along "b", "h", "q_idx" or "kv_idx"; their other lengths agree.

    Along q_idx and kv_idx all maps but the last must end with a whole block.
    """
    if axis not in INDICES:
        raise BlockMaskError(f"axis must be one of {', '.join(INDICES)}, not {axis!r}")
    at = INDICES.index(axis)
    first = _check_parts(maps, axis, at)
    maps = [m for m in maps if m.shape[at]] or [first]
    ends = [0]
    for m in maps:
        ends.append(ends[-1] + m.shape[at])
    programs = tuple(m.program for m in maps)
    program = _one_after_the_other(programs, axis, ends, first.device)
    shape = (*first.shape[:at], ends[-1], *first.shape[at + 1 :])
    grid = Grid.of(program, shape, first.block_size)  # type: ignore[arg-type]
    if at < 2:
        lengths = [m.shape[at] if axis in program.reads else 1 for m in maps]
        sizes = [(n, grid.heads) if at == 0 else (grid.batch, n) for n in lengths]
        if axis not in program.reads:
            maps, sizes = maps[:1], sizes[:1]
    else:
        sizes = [(grid.batch, grid.heads)] * len(maps)
    parts = [_spread(m, *size) for m, size in zip(maps, sizes, strict=True)]
    rows = [m.grid.rows for m in maps]
    if axis == "kv_idx":
        runs = _side_by_side(parts, [end // grid.block_kv for end in ends], grid)
    else:
        runs = _stacked(parts, [(*s, n) for s, n in zip(sizes, rows, strict=True)], min(at, 2))
    return replace(first, shape=shape, program=program, runs=runs)  # type: ignore[arg-type]


def _check_parts(maps: Sequence[BlockMask], axis: str, at: int) -> BlockMask:
    if not maps:
        raise BlockMaskError("maps must hold at least one map")
    first = maps[0]
    for m in maps:
        m.check_unchanged()
        if m.device != first.device:
            raise DeviceError(f"maps are on {first.device} and {m.device}: use .to(...)")
        rest = [n for i, n in enumerate(m.shape) if i != at], m.block_size
        if rest != ([n for i, n in enumerate(first.shape) if i != at], first.block_size):
            raise BlockMaskError(
                f"maps of {first.shape} and {m.shape}, in blocks of {first.block_size} and "
                f"{m.block_size}, don't fit together along {axis}"
            )
        if at >= 2 and m is not maps[-1] and m.shape[at] % m.block_size[at - 2]:
            raise BlockMaskError(
                f"maps: one of {m.shape[at]} along {axis} ends inside a block of "
                f"{m.block_size[at - 2]} and is not the last"
            )
    return first


def _one_after_the_other(
    programs: tuple[Program, ...], axis: str, ends: list[int], device: torch.device
) -> Program:
    same = all(p is programs[0] for p in programs)
    if same and axis not in programs[0].reads:
        return programs[0]

    def make(indices: Indices, call: Any) -> Any:
        index, value = indices[axis], None
        if len(programs) == 1:
            return call(programs[0], indices)
        for n in reversed(range(len(programs))):
            moved = within(ends[n + 1] - ends[n], ends[n])(index)
            part = call(programs[n], {**indices, axis: moved})
            value = part if value is None else torch.where(index < ends[n + 1], part, value)
        return value

    return joined(f"concat({', '.join(p.name for p in programs)})", programs, device, make)


def _stacked(parts: list[Runs], sizes: list[tuple[int, int, int]], axis: int) -> Runs:
    """Planes or rows of several runs, of (batch, heads, rows), as those of one."""
    spans, used = [], 0
    for runs, size in zip(parts, sizes, strict=True):
        spans.append(runs.spans.view(*size, 2) + used)
        used += len(runs.table)
    table = torch.cat([runs.table for runs in parts])
    return Runs(torch.cat(spans, axis).reshape(-1, 2), table)


def _side_by_side(parts: list[Runs], starts: list[int], grid: Grid) -> Runs:
    moved = []
    for runs, first in zip(parts, starts, strict=False):
        row, start, stop, kind = runs.segments()
        moved.append(Segments(row, start + first, stop + first, kind))
    segments = Segments(*(torch.cat(columns) for columns in zip(*moved, strict=True)))
    return Runs.from_segments(segments, grid.planes * grid.rows, grid.columns)
