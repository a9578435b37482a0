"""What a mask says about squares of its elements: nothing visible, all visible, or undecided.

The rules of `program.intervals` hold for any integers; here most lines are proven not to leave
32 bits, and truths are kept as booleans, so that a rule is one or two passes over the cells.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexmod.blocks.grid import Cells, Grid, spans
from flexmod.program import Program
from flexmod.program import intervals as general
from flexmod.program.bounds import operation
from flexmod.program.intervals import Interval
from flexmod.program.ir import Instruction, interpret
from flexmod.program.specialize import specialize
from flexmod.program.tables import Tables

Rule = Callable[..., Interval]


class MaskRanges:
    """A mask over a grid, asked about squares of blocks."""

    def __init__(self, program: Program, grid: Grid) -> None:
        self.grid = grid
        self.program = specialize(program, grid.extents)
        self.tables = Tables(self.program)
        # `specialize` narrows only lines that provably fit; those of a mask's own may overflow.
        self.proven = not any(
            line.dtype == torch.int32 and line.op != "load" for line in program.instructions
        )
        self.numbers = {
            line: _truths(general.settle(general.point(value), line.dtype), line.dtype)
            for line in self.program.instructions
            if line.op == "number"
            for value in [self.program.numbers[line.attr]]
        }

    def __call__(self, cells: Cells, level: int) -> tuple[Tensor, Tensor]:
        """Whether all, and whether any, elements of each square may be visible; bool [cells]."""
        b, h = cells.batch_and_head(self.grid)
        q_first, q_last, kv_first, kv_last = spans(self.grid, cells, level)
        ranges = {
            "b": Interval(b, b),
            "h": Interval(h, h),
            "q_idx": Interval(q_first, q_last),
            "kv_idx": Interval(kv_first, kv_last),
        }

        def leaf(_: int, line: Instruction, args: tuple[Interval, ...]) -> Interval:
            if line.op == "input":
                found = ranges[line.attr]
                return Interval(*(x.to(line.dtype) for x in found))
            if line.op == "number":
                return self.numbers[line]
            return self.table(line, args, level)

        every, some = interpret(self.program, leaf, self.apply)[self.program.outputs[0]]
        return every.expand(cells.row.shape), some.expand(cells.row.shape)

    def table(self, line: Instruction, args: tuple[Interval, ...], level: int) -> Interval:
        """What a load reads over ranges of its indices in squares of a level."""
        row, column = (self._group(a, level) for a in (None, None, *line.args)[-2:])
        return _truths(self.tables(line, args, (row, column)), line.dtype)

    def is_aligned(self, line: Instruction) -> bool:
        """Whether a load reads whole groups of entries, for which ranges are exact."""
        return self._group((None, *line.args)[-1], 0) is not None

    def _group(self, position: int | None, level: int) -> int | None:
        """log2 of how many entries an index runs over, where those are aligned groups of 2**n."""
        high, wide = self.grid.block_q << level, self.grid.block_kv << level
        sizes = {"b": 1, "h": 1, "q_idx": high, "kv_idx": wide}
        index = None if position is None else self.program.instructions[position]
        size = sizes.get(index.attr, 0) if index and index.op == "input" else 0
        return size.bit_length() - 1 if size and not size & (size - 1) else None

    def apply(self, line: Instruction, args: tuple[Interval, ...]) -> Interval:
        """What an operation does to ranges."""
        rule = _quick_rule(line, args, self.proven and line.dtype == torch.int32)
        if rule is not None:
            return rule(*args)
        found = operation(self.program, line, tuple(_wide(x) for x in args))
        return _truths(found, line.dtype)


def _truths(x: Interval, dtype: torch.dtype) -> Interval:
    """Booleans are kept as booleans: (surely, possibly)."""
    return Interval(x.lo != 0, x.hi != 0) if dtype == torch.bool else x


def _wide(x: Interval) -> Interval:
    """As the general rules want it."""
    return x if x.lo.is_floating_point() else Interval(x.lo.long(), x.hi.long())


def _quick_rule(line: Instruction, args: tuple[Interval, ...], proven: bool) -> Rule | None:
    """A rule for booleans, for comparisons of integers, or for arithmetic that cannot overflow."""
    kinds = {x.lo.dtype for x in args}
    if kinds == {torch.bool}:
        return _LOGIC.get(line.op)
    if torch.bool in kinds or any(k.is_floating_point for k in kinds):
        return None
    if line.dtype == torch.bool:
        return _COMPARISONS.get(line.op)
    if not proven:
        return None
    if line.op in ("mod", "mod_natural", "floordiv", "floordiv_natural"):
        if (_constant(args[1]) or 0) < 1:
            return None
    return _ARITHMETIC.get(line.op)


def _constant(x: Interval) -> int | None:
    """The value of a number of the program."""
    single = not x.lo.ndim and x.lo.device.type == "cpu" and int(x.lo) == int(x.hi)
    return int(x.lo) if single else None


def _mod(x: Interval, y: Interval) -> Interval:
    """By a positive constant: exact inside one period, else anything."""
    divisor = y.lo
    period = torch.floor_divide(x.lo, divisor)
    same = period == torch.floor_divide(x.hi, divisor)
    start = period * divisor
    return Interval(
        torch.where(same, x.lo - start, 0), torch.where(same, x.hi - start, divisor - 1)
    )


def _floordiv(x: Interval, y: Interval) -> Interval:
    return Interval(torch.floor_divide(x.lo, y.lo), torch.floor_divide(x.hi, y.lo))


def _mul(x: Interval, y: Interval) -> Interval:
    if (_constant(y) or -1) >= 0:
        return Interval(x.lo * y.lo, x.hi * y.lo)
    a, b, c, d = x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi
    low = torch.minimum(torch.minimum(a, b), torch.minimum(c, d))
    return Interval(low, torch.maximum(torch.maximum(a, b), torch.maximum(c, d)))


def _eq(x: Interval, y: Interval) -> Interval:
    return Interval((x.hi <= y.lo) & (x.lo >= y.hi), (x.hi >= y.lo) & (x.lo <= y.hi))


def _not(x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


_LOGIC: dict[str, Rule] = {
    "and": lambda x, y: Interval(x.lo & y.lo, x.hi & y.hi),
    "or": lambda x, y: Interval(x.lo | y.lo, x.hi | y.hi),
    "not": _not,
}
_COMPARISONS: dict[str, Rule] = {
    "lt": lambda x, y: Interval(x.hi < y.lo, x.lo < y.hi),
    "le": lambda x, y: Interval(x.hi <= y.lo, x.lo <= y.hi),
    "gt": lambda x, y: Interval(x.lo > y.hi, x.hi > y.lo),
    "ge": lambda x, y: Interval(x.lo >= y.hi, x.hi >= y.lo),
    "eq": _eq,
    "ne": lambda x, y: _not(_eq(x, y)),
}
_ARITHMETIC: dict[str, Rule] = {
    "add": lambda x, y: Interval(x.lo + y.lo, x.hi + y.hi),
    "sub": lambda x, y: Interval(x.lo - y.hi, x.hi - y.lo),
    "neg": lambda x: Interval(-x.hi, -x.lo),
    "mul": _mul,
    "minimum": lambda x, y: Interval(torch.minimum(x.lo, y.lo), torch.minimum(x.hi, y.hi)),
    "maximum": lambda x, y: Interval(torch.maximum(x.lo, y.lo), torch.maximum(x.hi, y.hi)),
    "mod": _mod,
    "mod_natural": _mod,
    "floordiv": _floordiv,
    "floordiv_natural": _floordiv,
}
