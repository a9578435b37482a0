"""The lines of a mask as sums of a part of the query and a part of the key, and as atoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexmod.blocks.atoms import COMPARISONS, Atom, Frame, compare, row_atom
from flexmod.blocks.grid import Cells, Grid, spans
from flexmod.blocks.ranges import MaskRanges
from flexmod.blocks.sums import LIMITS, NotSeparable, Part, Sum, known
from flexmod.program.intervals import Interval
from flexmod.program.ir import Instruction, interpret


class Separated:
    """A mask over a grid.

    Attributes:
        atoms: its comparisons, which change a few times along a row of blocks.
        only_whole: what an atom calls mixed need not be so in blocks that an end cuts short.

    Raises:
        NotSeparable: for a mask of another form.
    """

    def __init__(self, ranges: MaskRanges, device: torch.device) -> None:
        self.ranges, self.grid = ranges, ranges.grid
        self.frame = Frame(self.grid.columns, device)
        self.atoms: dict[Instruction, Atom] = {}
        self.only_whole = False
        self.inputs = _indices(self.grid, device)
        interpret(ranges.program, self._leaf, self._apply)

    def _leaf(self, _: int, line: Instruction, args: tuple[Any, ...]) -> Sum | None:
        if line.op == "input":
            return self.inputs[line.attr].cast(line.dtype)
        if line.op == "number":
            return self._sum_or_truth(line, Sum(Part(self.ranges.numbers[line], False, True, 1)))
        return self._sum_or_truth(line, self._load(line, _sums(args)))

    def _apply(self, line: Instruction, args: tuple[Any, ...]) -> Sum | None:
        kinds = {self.ranges.program.instructions[a].dtype for a in line.args}
        if line.dtype == torch.bool and kinds == {torch.bool}:
            return None  # made of other truths
        sums = _sums(args)
        whole = not any(kind.is_floating_point or kind == torch.bool for kind in kinds)
        if whole and line.op in COMPARISONS:
            x, y = sums
            self.atoms[line] = compare(line.op, x, y, self.frame)
            return None
        if whole and line.dtype in LIMITS:
            try:
                return self._arithmetic(line, sums)
            except NotSeparable:
                pass  # unless it is of the query alone, or of the key alone
        return self._sum_or_truth(line, self._alone(line, sums))

    def _sum_or_truth(self, line: Instruction, found: Sum) -> Sum | None:
        if line.dtype != torch.bool:
            return found
        if found.column is not None or found.row is None:
            raise NotSeparable
        self.atoms[line] = row_atom(*found.row.span, found.row.ends, self.frame)
        return None

    def _load(self, line: Instruction, args: list[Sum]) -> Sum:
        if set(line.attr.modes) - {"proven"}:
            raise NotSeparable
        still = not any(x.moves for x in args)
        # A group of entries may go on past the last query or key.
        self.only_whole |= not still and any(self.grid.cuts)
        ends = still or (self.ranges.is_aligned(line) and not any(x.moves for x in args[:-1]))
        span, keyed = _one_sided(args, lambda spans: self.ranges.table(line, spans, 0))
        part = Part(span, not still, ends, int(still))
        size = None if line.dtype == torch.int64 else 1 << 31
        return Sum(None, part, size) if keyed else Sum(part, None, size)

    def _arithmetic(self, line: Instruction, sums: list[Sum]) -> Sum:
        number, dtype = sums[-1].number, line.dtype
        match line.op:
            case "add":
                x, y = known(*sums)
                return x.plus(y, dtype)
            case "sub":
                x, y = known(*sums)
                return x.plus(y.each(Part.minus), dtype)
            case "neg":
                return known(*sums)[0].times(-1, dtype)
            case "mul" if number is not None:
                return known(sums[0])[0].times(number, dtype)
            case "cast" if (sums[0].size or 1 << 62) <= LIMITS[dtype]:
                return sums[0].cast(dtype)
            case "mod" | "mod_natural" if number and 0 < number <= sums[0].width:
                self.only_whole |= any(self.grid.cuts)
                return _all_below(number)
        raise NotSeparable

    def _alone(self, line: Instruction, sums: list[Sum]) -> Sum:
        """Any operation on values of the query alone, or of the key alone."""
        span, keyed = _one_sided(sums, lambda spans: self.ranges.apply(line, spans))
        part, size = Part(span, any(x.moves for x in sums)), None
        divisor = sums[-1].number
        if line.op in ("floordiv", "floordiv_natural") and divisor is not None and divisor > 0:
            old, size = sums[0].parts[0], sums[0].size
            part = old._replace(span=span, width=old.width and max(1, old.width // divisor))
        return Sum(None, part, size) if keyed else Sum(part, None, size)


def _sums(args: tuple[Any, ...]) -> list[Sum]:
    """What is no truth; a number made of truths is no sum."""
    if any(x is None for x in args):
        raise NotSeparable
    return list(args)


def _one_sided(
    sums: list[Sum], rule: Callable[[tuple[Interval, ...]], Interval]
) -> tuple[Interval, bool]:
    """The range of a function of values of one side, and whether that is the key's."""
    keyed = any(x.column is not None for x in sums)
    if any(len(x.parts) != 1 or (keyed and x.row is not None and x.row.moves) for x in sums):
        raise NotSeparable
    return rule(tuple(x.parts[0].span for x in sums)), keyed


def _all_below(number: int) -> Sum:
    """Anything in [0, number), at every block. It moves with both query and key."""
    lo, hi = (torch.tensor(n, device="cpu") for n in (0, number - 1))
    row = Part(Interval(lo, hi), True, True, number)
    return Sum(row, Part(Interval(lo, lo), True, True, 1, True), number)


def _indices(grid: Grid, device: torch.device) -> dict[str, Sum]:
    sizes = (grid.planes, grid.rows, grid.columns)
    plane, row, column = (torch.arange(n, device=device, dtype=grid.index_dtype) for n in sizes)
    cells = Cells(plane[:, None], row, column)
    b, h = (Part(Interval(x, x), False, True, 1) for x in cells.batch_and_head(grid))
    q_first, q_last, kv_first, kv_last = spans(grid, cells, 0)
    high, wide = min(grid.block_q, grid.q_len), min(grid.block_kv, grid.kv_len)
    return {
        "b": Sum(b, None, grid.batch),
        "h": Sum(h, None, grid.heads),
        "q_idx": Sum(Part(Interval(q_first, q_last), True, True, high), None, grid.q_len),
        "kv_idx": Sum(None, Part(Interval(kv_first, kv_last), True, True, wide, True), grid.kv_len),
    }
