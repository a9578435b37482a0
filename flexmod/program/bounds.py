"""A program on intervals: from ranges of b, h, q_idx, kv_idx to the range of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
            value = intervals.point(program.numbers[instruction.attr])
            return intervals.settle(value, instruction.dtype)
        if instruction.op == "input":
            name = str(instruction.attr)
            return ranges[name] if name in ranges else intervals.anything(instruction.dtype)
        return load(instruction, args) if load else intervals.anything(instruction.dtype)

    def apply(instruction: Instruction, args: tuple[Interval, ...]) -> Interval:
        return operation(program, instruction, args)

    return interpret(program, leaf, apply)


def operation(program: Program, instruction: Instruction, args: tuple[Interval, ...]) -> Interval:
    """The interval of one operation's result. "exact" ones are not widened for rounding."""
    if instruction.op == "round_to":
        return intervals.settle(args[0], instruction.attr)
    if instruction.op == "cast":
        if instruction.attr == "exact":
            return intervals.to_float(args[0])
        source = program.instructions[instruction.args[0]].dtype
        return intervals.convert(args[0], source, instruction.dtype)
    found = TABLE[instruction.op].bounds(*args)
    return found if instruction.attr == "exact" else intervals.settle(found, instruction.dtype)


class Pyramid:
    """Range minimum and maximum of a table along its last axis.

    Level j holds the extremes of aligned groups of 2**j entries, made when it is first asked for.
    A range is answered from one group if it is one, else from at most nine groups around it: the
    answer may be a little wide, never narrow.
    """

    GROUPS = 3  # log2 of how many groups a range that is not one group itself is cut into
    STEP = 7  # log2 of how many groups are gathered into one at most

    def __init__(self, table: Tensor) -> None:
        self.length = table.shape[-1]
        low = table.reshape(-1, self.length)
        if table.dtype == torch.bool:
            low = low.to(torch.uint8)
        self.levels = {0: (low, low)}

    def level(self, level: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest entries of groups, [rows, groups]."""
        level = min(level, (self.length - 1).bit_length())
        if level not in self.levels:
            finer = max(n for n in self.levels if n < level)
            if level - finer > self.STEP:  # the levels between will be asked for as well
                finer += self.STEP
            low, high = self.level(finer)
            size = 1 << level - finer
            if low is high:
                self.levels[level] = _by_groups(low, size, _both_extremes)
            else:
                (low,), (high,) = (
                    _by_groups(low, size, lambda x: (x.amin(-1),)),
                    _by_groups(high, size, lambda x: (x.amax(-1),)),
                )
                self.levels[level] = low, high
        return self.levels[level]

    def query(self, row: Tensor, lo: Tensor, hi: Tensor) -> Interval:
        """Extremes over entries lo..hi (inclusive, in range) of the given rows, int64."""
        row, lo, hi = torch.broadcast_tensors(row, lo, hi)
        if not lo.numel():
            return Interval(lo.long(), lo.long())
        if lo.ndim != 1:
            flat = self.query(row.flatten(), lo.flatten(), hi.flatten())
            return Interval(*(x.view(lo.shape) for x in flat))
        level = torch.log2((hi - lo + 1).double()).ceil().to(lo.dtype)
        whole = (lo >> level << level == lo) & (hi >> level == lo >> level)
        whole &= (hi == self.length - 1) | ((hi + 1) >> level << level == hi + 1)
        finer = (level - self.GROUPS).clamp(min=0)
        level = torch.where(whole.all(), level, finer)
        steps = (hi >> level) - (lo >> level)
        lowest, highest, most = torch.stack([level.amin(), level.amax(), steps.amax()]).tolist()
        if lowest == highest:
            return self._groups(lowest, most, row, lo, hi)
        low, high = torch.empty_like(lo, dtype=torch.long), torch.empty_like(lo, dtype=torch.long)
        for each in range(lowest, highest + 1):
            some = (level == each).nonzero().flatten()
            low[some], high[some] = self._groups(each, most, row[some], lo[some], hi[some])
        return Interval(low, high)

    def aligned(self, row: Tensor, lo: Tensor, level: int) -> Interval:
        """Extremes over the groups of 2**level entries that begin at lo."""
        lows, highs = self.level(level)
        place = row * lows.shape[-1] + (lo >> level)
        return Interval(lows.reshape(-1)[place].long(), highs.reshape(-1)[place].long())

    def _groups(self, level: int, steps: int, row: Tensor, lo: Tensor, hi: Tensor) -> Interval:
        """Extremes of the groups of one level that ranges touch, at most steps + 1 each."""
        lows, highs = self.level(level)
        base = row * lows.shape[-1]
        first, last = base + (lo >> level), base + (hi >> level)
        low, high = lows.reshape(-1)[first], highs.reshape(-1)[first]
        for step in range(1, steps + 1):
            group = torch.minimum(first + step, last)
            low = torch.minimum(low, lows.reshape(-1)[group])
            high = torch.maximum(high, highs.reshape(-1)[group])
        return Interval(low.long(), high.long())


def _by_groups(
    table: Tensor, size: int, reduce: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """A reduction of each `size` neighbours in a row; the last group may be smaller."""
    whole = table.shape[-1] // size * size
    parts = [table[:, :whole].unflatten(-1, (-1, size))] if whole else []
    if whole < table.shape[-1]:
        parts.append(table[:, None, whole:])
    found = [reduce(part) for part in parts]
    return tuple(x[0] if len(x) == 1 else torch.cat(x, -1) for x in zip(*found, strict=True))


def _both_extremes(x: Tensor) -> Sequence[Tensor]:
    """On a CPU aminmax is fast for integers, slow for floats."""
    return (x.amin(-1), x.amax(-1)) if x.is_floating_point() else torch.aminmax(x, dim=-1)


def table_ranges(program: Program) -> Callable[..., Interval]:
    """Load rule that looks into integer and boolean captured tensors through pyramids.

    It takes `group` as well: the last index runs over whole aligned groups of 2**group entries,
    of which the last one may end with the table.
    """
    pyramids: dict[int, Pyramid] = {}

    def load(
        instruction: Instruction, indices: tuple[Interval, ...], group: int | None = None
    ) -> Interval:
        slot, modes = instruction.attr
        tensor = program.captures[slot]
        whole = intervals.anything(instruction.dtype)
        if instruction.dtype.is_floating_point or not tensor.numel():
            return whole
        row = torch.zeros(1, dtype=torch.long, device=tensor.device)
        known: Tensor | None = None  # None: everywhere
        last = intervals.point(0)
        for axis, (index, mode, length) in enumerate(
            zip(indices, modes, tensor.shape, strict=True)
        ):
            last = index
            if mode != "proven":
                last, inside = _wrap(index, length)
                known = inside if known is None else known & inside
            if axis < tensor.ndim - 1:  # rows are single values
                single = last.lo == last.hi
                known = single if known is None else known & single
                row = row * length + last.lo
        if slot not in pyramids:
            pyramids[slot] = Pyramid(tensor if tensor.ndim else tensor.reshape(1))
        if known is None:
            if group is not None:
                return pyramids[slot].aligned(row, last.lo, group)
            return pyramids[slot].query(row, last.lo, last.hi)
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
