"""A program on intervals: from ranges of b, h, q_idx, kv_idx to the range of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexmod.program import intervals
from flexmod.program.intervals import Interval
from flexmod.program.ir import Instruction, Program, interpret
from flexmod.program.ops import TABLE

LoadRule = Callable[[Instruction, tuple[Interval, ...]], Interval]


def bounds(
    program: Program, ranges: Mapping[str, Interval], load: LoadRule | None = None
) -> list[Interval]:
    """The interval of every line of the program, one element a cell of the given ranges.

    `load` answers what a captured tensor holds over ranges of its indices; without it a load may
    be anything that its type can hold.
    """

    def leaf(_: int, instruction: Instruction, args: tuple[Interval, ...]) -> Interval:
        if instruction.op == "number":
            value = intervals.point(program.numbers[instruction.attr])  # type: ignore[index]
            return intervals.settle(value, instruction.dtype)
        if instruction.op == "input":
            name = str(instruction.attr)
            return ranges[name] if name in ranges else intervals.anything(instruction.dtype)
        return load(instruction, args) if load else intervals.anything(instruction.dtype)

    def apply(instruction: Instruction, args: tuple[Interval, ...]) -> Interval:
        if instruction.op in ("cast", "round_to"):
            source = program.instructions[instruction.args[0]].dtype
            if instruction.op == "cast":
                return intervals.convert(args[0], source, instruction.dtype)
            return intervals.settle(args[0], instruction.attr)  # type: ignore[arg-type]
        return intervals.settle(TABLE[instruction.op].bounds(*args), instruction.dtype)

    return interpret(program, leaf, apply)


class Pyramid:
    """Range minimum and maximum of an integer or boolean table along its last axis.

    Level j holds the extremes of aligned groups of 2**j entries, two tables' worth of memory in
    all. A range is answered from at most nine groups around it, so the answer may be a little
    wide, never narrow; it is exact for aligned power-of-two ranges.
    """

    GROUPS = 8

    def __init__(self, table: Tensor) -> None:
        self.length = table.shape[-1]
        low = high = table.reshape(-1, self.length).long()
        self.levels = [(low, high)]
        while low.shape[-1] > 1:
            if low.shape[-1] % 2:
                low = torch.cat([low, low[:, -1:]], -1)
                high = torch.cat([high, high[:, -1:]], -1)
            low, high = low.unflatten(-1, (-1, 2)).amin(-1), high.unflatten(-1, (-1, 2)).amax(-1)
            self.levels.append((low, high))

    def query(self, row: Tensor, lo: Tensor, hi: Tensor) -> Interval:
        """Extremes over entries lo..hi (inclusive, in range) of the given rows; shape [cells]."""
        row, lo, hi = torch.broadcast_tensors(row, lo, hi)
        spans = (hi - lo + 1).double()
        wanted = torch.ceil(torch.log2(spans / self.GROUPS)).clamp(0, len(self.levels) - 1).long()
        low, high = torch.empty_like(lo), torch.empty_like(lo)
        for level in wanted.unique().tolist():
            chosen = wanted == level
            lows, highs = self.levels[level]
            first, last = lo[chosen] >> level, hi[chosen] >> level
            steps = torch.arange(self.GROUPS + 1, device=lo.device)
            groups = torch.minimum(first[:, None] + steps, last[:, None])
            low[chosen] = lows[row[chosen][:, None], groups].amin(-1)
            high[chosen] = highs[row[chosen][:, None], groups].amax(-1)
        return Interval(low, high)


def table_ranges(program: Program) -> LoadRule:
    """Load rule that looks into integer and boolean captured tensors through pyramids."""
    pyramids: dict[int, Pyramid] = {}

    def load(instruction: Instruction, indices: tuple[Interval, ...]) -> Interval:
        slot = instruction.attr.slot  # type: ignore[union-attr]
        tensor = program.captures[slot]
        whole = intervals.anything(instruction.dtype)
        if instruction.dtype.is_floating_point or not tensor.numel():
            return whole
        wrapped = [_wrap(i, n) for i, n in zip(indices, tensor.shape, strict=True)]
        shape = torch.broadcast_shapes(*(i.lo.shape for i, _ in wrapped), torch.Size([1]))
        known = torch.ones(shape, dtype=torch.bool, device=tensor.device)
        row = torch.zeros(shape, dtype=torch.long, device=tensor.device)
        for axis, (index, inside) in enumerate(wrapped):
            known = known & inside
            if axis < tensor.ndim - 1:
                known = known & (index.lo == index.hi)  # rows are single values
                row = row * tensor.shape[axis] + index.lo
        if slot not in pyramids:
            pyramids[slot] = Pyramid(tensor if tensor.ndim else tensor.reshape(1))
        last = wrapped[-1][0] if wrapped else intervals.point(0)
        lo, hi = pyramids[slot].query(torch.where(known, row, 0), last.lo, last.hi)
        return Interval(torch.where(known, lo, whole.lo), torch.where(known, hi, whole.hi))

    return load


def _wrap(index: Interval, length: int) -> tuple[Interval, Tensor]:
    """An index interval as positions in [0, length), and where it is proven to be in range."""
    inside = (index.lo >= -length) & (index.hi < length)
    negative, mixed = index.hi < 0, (index.lo < 0) & (index.hi >= 0)
    lo = torch.where(negative, index.lo + length, index.lo)
    hi = torch.where(negative, index.hi + length, index.hi)
    lo, hi = torch.where(mixed, 0, lo), torch.where(mixed, length - 1, hi)
    return Interval(lo.clamp(0, length - 1), hi.clamp(0, length - 1)), inside
