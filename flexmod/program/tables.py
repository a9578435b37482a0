"""What captured tensors hold over ranges of their indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmod.program import intervals
from flexmod.program.intervals import Interval
from flexmod.program.ir import Instruction, Program


class Pyramid:
    """Range minimum and maximum of a table along its last axis, or its last two.

    Level (i, j) holds the extremes of aligned groups of 2**i by 2**j entries, made when it is first
    asked for. A range of one row is answered from one group if it is one, else from at most nine
    groups around it: the answer may be a little wide, never narrow. A NaN makes both ends NaN.
    """

    GROUPS = 3  # log2 of how many groups a range that is not one group itself is cut into
    STEP = 7  # larger groups are made of groups of this level, so that a table is read once

    def __init__(self, table: Tensor, axes: int = 1) -> None:
        table = table.reshape(-1, *([1] * (2 - axes)), *table.shape[-axes:])
        self.height, self.length = table.shape[1:]
        if table.dtype == torch.bool:
            table = table.to(torch.uint8)
        self.levels = {(0, 0): (table, table)}

    def level(self, high: int, wide: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest entries of groups, [outer axes, groups, groups]."""
        high = min(high, (self.height - 1).bit_length())
        wide = min(wide, (self.length - 1).bit_length())
        if (high, wide) not in self.levels:
            source = (min(high, self.STEP), min(wide, self.STEP))
            if source == (high, wide):
                source = (0, wide if high else 0)
            found = _by_groups(*self.level(*source), 1 << wide - source[1], -1)
            self.levels[high, wide] = _by_groups(*found, 1 << high - source[0], -2)
        return self.levels[high, wide]

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
        dtype = _wide(*self.level(0, lowest)).lo.dtype
        low, high = (torch.empty_like(lo, dtype=dtype) for _ in range(2))
        for each in range(lowest, highest + 1):
            some = (level == each).nonzero().flatten()
            low[some], high[some] = self._groups(each, most, row[some], lo[some], hi[some])
        return Interval(low, high)

    def aligned(self, outer: Tensor, row: Tensor, lo: Tensor, level: tuple[int, int]) -> Interval:
        """Extremes over the groups of a level that begin at (row, lo) of each table."""
        lows, highs = self.level(*level)
        place = (outer * lows.shape[1] + (row >> level[0])) * lows.shape[2] + (lo >> level[1])
        return _wide(lows.reshape(-1)[place], highs.reshape(-1)[place])

    def _groups(self, level: int, steps: int, row: Tensor, lo: Tensor, hi: Tensor) -> Interval:
        """Extremes of the groups of one level that ranges touch, at most steps + 1 each."""
        lows, highs = self.level(0, level)
        base = row * lows.shape[-1]
        first, last = base + (lo >> level), base + (hi >> level)
        low, high = lows.reshape(-1)[first], highs.reshape(-1)[first]
        for step in range(1, steps + 1):
            group = torch.minimum(first + step, last)
            low = torch.minimum(low, lows.reshape(-1)[group])
            high = torch.maximum(high, highs.reshape(-1)[group])
        return _wide(low, high)


def _by_groups(low: Tensor, high: Tensor, size: int, axis: int) -> tuple[Tensor, Tensor]:
    """Extremes of each `size` neighbours; the last group may be smaller."""
    if size == 1:
        return low, high
    length = low.shape[axis]
    whole = length // size * size
    found = []
    for start, end, each in ((0, whole, size), (whole, length, length - whole)):
        if start < end:
            parts = [x.narrow(axis, start, end - start).unflatten(axis, (-1, each))
                     for x in ((low,) if low is high else (low, high))]  # fmt: skip
            found.append(_extremes(parts, axis))
    lows, highs = zip(*found, strict=True)
    return torch.cat(lows, axis), torch.cat(highs, axis)


def _extremes(parts: list[Tensor], axis: int) -> Sequence[Tensor]:
    if len(parts) == 1 and not parts[0].is_floating_point():  # fast for integers only
        return torch.aminmax(parts[0], dim=axis)
    return parts[0].amin(axis), parts[-1].amax(axis)


def _wide(low: Tensor, high: Tensor) -> Interval:
    """As intervals have it."""
    dtype = torch.float64 if low.is_floating_point() else torch.int64
    return Interval(low.to(dtype), high.to(dtype))


class Tables:
    """What the captured tensors of a program hold over ranges of their indices."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pyramids: dict[tuple[int, int], Pyramid] = {}

    def __call__(
        self,
        line: Instruction,
        indices: tuple[Interval, ...],
        groups: tuple[int | None, int | None] = (None, None),
    ) -> Interval:
        """The range of what a load reads.

        groups: n where the last index but one, and the last, run over whole aligned groups of 2**n
            entries, of which the last may end with the table.
        """
        tensor = self.program.captures[line.attr.slot]
        whole = intervals.anything(line.dtype)
        if not tensor.numel():
            return whole
        known: Tensor | None = None  # None: everywhere
        places = []
        for index, mode, length in zip(indices, line.attr.modes, tensor.shape, strict=True):
            if mode != "proven":
                index, inside = _wrap(index, length)
                known = inside if known is None else known & inside
            places.append(index)
        moving = [n for n, place in enumerate(places[:-1]) if place.lo is not place.hi]
        high, wide = groups
        squares = high is not None and wide is not None and moving == [len(places) - 2]
        if known is None and squares:
            outer, begin = self._row(tensor, places[:-2]), (places[-2].lo, places[-1].lo)
            found = self._pyramid(line, 2).aligned(outer, *begin, (high or 0, wide or 0))
            return self._settled(line, found)
        for n in moving:  # rows are single values
            single = places[n].lo == places[n].hi
            known = single if known is None else known & single
        row, last = self._row(tensor, places[:-1]), places[-1] if places else intervals.point(0)
        pyramid = self._pyramid(line, 1)
        if known is None and wide is not None:
            found = pyramid.aligned(row, row.new_zeros(()), last.lo, (0, wide))
            return self._settled(line, found)
        if known is None:
            return self._settled(line, pyramid.query(row, last.lo, last.hi))
        found = pyramid.query(torch.where(known, row, 0), last.lo, last.hi)
        lo, hi = self._settled(line, found)
        return Interval(torch.where(known, lo, whole.lo), torch.where(known, hi, whole.hi))

    @staticmethod
    def _settled(line: Instruction, found: Interval) -> Interval:
        return intervals.settle(found, line.dtype) if line.dtype.is_floating_point else found

    def _pyramid(self, line: Instruction, axes: int) -> Pyramid:
        slot = line.attr.slot
        if (slot, axes) not in self.pyramids:
            tensor = self.program.captures[slot]
            self.pyramids[slot, axes] = Pyramid(tensor if tensor.ndim else tensor.view(1), axes)
        return self.pyramids[slot, axes]

    @staticmethod
    def _row(tensor: Tensor, places: list[Interval]) -> Tensor:
        """The number of a row, or of a table, of those that a captured tensor is made of."""
        row = torch.zeros(1, dtype=torch.long, device=tensor.device)
        for place, length in zip(places, tensor.shape, strict=False):
            row = row * length + place.lo
        return row


def _wrap(index: Interval, length: int) -> tuple[Interval, Tensor]:
    """An index interval as positions in [0, length), and where it is proven to be in range."""
    inside = (index.lo >= -length) & (index.hi < length)
    negative, mixed = index.hi < 0, (index.lo < 0) & (index.hi >= 0)
    lo = torch.where(negative, index.lo + length, index.lo)
    hi = torch.where(negative, index.hi + length, index.hi)
    lo, hi = torch.where(mixed, 0, lo), torch.where(mixed, length - 1, hi)
    return Interval(lo.clamp(0, length - 1), hi.clamp(0, length - 1)), inside
