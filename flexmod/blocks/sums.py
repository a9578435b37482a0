"""Lines of a mask as sums: a part of the query (and of batch and head) plus a part of the key.

What most masks compare is such a sum: q_idx - kv_idx, or the ids of two documents. Its parts are
known for every row and for every column of blocks, so that nothing is computed for every block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.program.intervals import Interval

# Sums stay below these, so that neither they nor their parts can leave their types.
LIMITS = {torch.int32: 1 << 30, torch.int64: 1 << 60}
_CHECKED = 1 << 40  # entries of a table of int64 below this can be added


class NotSeparable(Exception):
    """A line is no such sum: the mask is decided coarse to fine instead."""


class Part(NamedTuple):
    """The ranges of a value over the blocks of one axis."""

    span: Interval  # [planes or 1, blocks or 1] of the query, [..., blocks] of the key, or 0-dim
    moves: bool = True  # it depends on the position along the axis
    ends: bool = False  # it takes both ends of its range in every block
    width: int = 0  # it takes all integers of its range, at least so many in a whole block; 0: no
    rising: bool | None = None  # from block to block along the keys; False: falling; None: unknown

    def cast(self, dtype: torch.dtype) -> Part:
        return self._replace(span=Interval(*(x.to(dtype) for x in self.span)))

    def minus(self) -> Part:
        turned = None if self.rising is None else not self.rising
        return self._replace(span=Interval(-self.span.hi, -self.span.lo), rising=turned)

    def times(self, factor: int) -> Part:
        if factor < 0:
            return self.minus().times(-factor)
        width = self.width if factor == 1 or not self.moves else 0
        span = Interval(self.span.lo * factor, self.span.hi * factor)
        return self._replace(span=span, width=width)

    def plus(self, other: Part) -> Part:
        """Two that move need not reach their ends together."""
        together = not (self.moves and other.moves)
        width = self.width + other.width - 1 if together and self.width and other.width else 0
        still = self if other.moves and not self.moves else other
        moving = other if still is self else self
        alike = not still.moves or self.rising == other.rising
        return Part(
            Interval(self.span.lo + other.span.lo, self.span.hi + other.span.hi),
            self.moves or other.moves,
            self.ends and other.ends and together,
            width,
            moving.rising if alike else None,
        )


@dataclass(frozen=True)
class Sum:
    """A value that is `row + column` at every block."""

    row: Part | None = None
    column: Part | None = None
    size: int | None = None  # neither part is larger; None: unknown

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.row, self.column) if part is not None]

    @property
    def number(self) -> int | None:
        """The value, if it is an integer that the program holds."""
        if self.column is not None or self.row is None or self.row.moves:
            return None
        lo, hi = self.row.span
        plain = not lo.ndim and not lo.is_floating_point()
        return int(lo) if plain and int(lo) == int(hi) else None

    @property
    def width(self) -> int:
        """How many neighbouring integers it takes in a whole block, all of its range; or 0."""
        widths = [part.width for part in self.parts]
        return sum(widths) - len(widths) + 1 if all(widths) else 0

    @property
    def moves(self) -> bool:
        return any(part.moves for part in self.parts)

    def each(self, change: Callable[[Part], Part]) -> Sum:
        row, column = (None if part is None else change(part) for part in (self.row, self.column))
        return Sum(row, column, self.size)

    def cast(self, dtype: torch.dtype) -> Sum:
        return self.each(lambda part: part.cast(dtype))

    def plus(self, other: Sum, dtype: torch.dtype) -> Sum:
        size = (self.size or 0) + (other.size or 0)
        if size > LIMITS[dtype]:
            raise NotSeparable
        return Sum(_joined(self.row, other.row), _joined(self.column, other.column), size)

    def times(self, factor: int, dtype: torch.dtype) -> Sum:
        size = (self.size or 0) * abs(factor)
        if size > LIMITS[dtype]:
            raise NotSeparable
        return replace(self.each(lambda part: part.times(factor)), size=size)


def _joined(x: Part | None, y: Part | None) -> Part | None:
    return x.plus(y) if x and y else x or y


def known(*sums: Sum) -> list[Sum]:
    """The same with sizes and directions, for which tables are looked at once."""
    flags: list[Tensor] = []
    sums = tuple(_sized(each) for each in sums)
    for each in sums:
        if each.size is None:
            ends = [end for part in each.parts for end in part.span]
            flags += [((end > -_CHECKED) & (end < _CHECKED)).all() for end in ends]
        if each.column is not None and each.column.rising is None:
            if not all(end.ndim for end in each.column.span):  # kv_idx % 8: the same everywhere
                raise NotSeparable
            pairs = [(end[..., :-1], end[..., 1:]) for end in each.column.span]
            flags += [(a <= b).all() for a, b in pairs] + [(a >= b).all() for a, b in pairs]
    answers = iter(torch.stack(flags).tolist() if flags else [])
    found = []
    for each in sums:
        size, column = each.size, each.column
        if size is None:
            size = _CHECKED
            if not all([next(answers) for _ in range(2 * len(each.parts))]):
                raise NotSeparable
        if column is not None and column.rising is None:
            low, high, low_falls, high_falls = (next(answers) for _ in range(4))
            if not ((low and high) or (low_falls and high_falls)):
                raise NotSeparable
            column = column._replace(rising=low and high)
        found.append(Sum(each.row, column, size))
    return found


def _sized(x: Sum) -> Sum:
    if x.number is not None:
        return replace(x, size=abs(x.number))
    if x.size is None and not any(part.span.lo.ndim for part in x.parts):
        raise NotSeparable  # of numbers alone, and not worked out
    return x
