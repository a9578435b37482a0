"""What the extents of a call make cheaper: fewer and 32-bit integers, loads proven in range."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch

from flexmod.program.bounds import bounds
from flexmod.program.hoist import hoist
from flexmod.program.intervals import Interval, point
from flexmod.program.ir import Instruction, Load, Program

_INT32 = torch.iinfo(torch.int32)
_NATURAL = {"floordiv": "floordiv_natural", "mod": "mod_natural"}
_memory: OrderedDict[object, tuple[Program, dict[int, int], int]] = OrderedDict()
_MEMORY_SIZE = 512


def specialize(program: Program, extents: Mapping[str, int]) -> Program:
    """The same program for indices in [0, extent): every value is unchanged.

    Integer arithmetic is moved to what depends on one index alone (see `hoist`). int64 lines that
    provably fit become int32, floor division and modulo of non-negative operands become plain
    ones, and each axis of each load is marked "proven" (index in [0, length)), "wrap" (in
    [-length, length)) or "check" (may be out of range).
    """
    shapes = tuple(c.shape for c in program.captures)
    memory = (program.identity, shapes, tuple(extents.items()))
    if memory not in _memory:
        ends = _ends(program, extents)
        hoisted, order = hoist(program, ends)
        if (hoisted.instructions, hoisted.numbers) != (program.instructions, program.numbers):
            ends = _ends(hoisted, extents)
        instructions, moved = _Narrower(hoisted, ends).run()
        outputs = tuple(moved[n] for n in hoisted.outputs)
        narrow = replace(hoisted, instructions=instructions, outputs=outputs, captures=())
        moved = {old: moved[new] for old, new in order.items()}
        _memory[memory] = (narrow, moved, replace(narrow, captures=program.captures).key)
        if len(_memory) > _MEMORY_SIZE:
            _memory.popitem(last=False)
    narrow, moved, key = _memory[memory]
    found = Program(
        program.kind,
        program.name,
        narrow.instructions,
        narrow.outputs,
        narrow.numbers,
        program.captures,
        {moved[n]: site for n, site in program.sites.items() if n in moved},
    )
    found.__dict__["key"] = key  # as `Program.key` would find it
    return found


def _ends(program: Program, extents: Mapping[str, int]) -> list[tuple[float, float]]:
    """The interval of each line."""
    ranges = {
        name: Interval(point(0).lo, point(max(extent - 1, 0)).hi)
        for name, extent in extents.items()
    }
    return [(i.lo.item(), i.hi.item()) for i in bounds(program, ranges)]


class _Narrower:
    """Rebuilds a program line by line; operands of one line keep one type, by casts."""

    def __init__(self, program: Program, ends: list[tuple[float, float]]) -> None:
        self.program, self.ends = program, ends
        self.lines: list[Instruction] = []
        self.moved: dict[int, int] = {}  # position in the program -> position in `lines`
        self.casts: dict[tuple[int, torch.dtype], int] = {}

    def run(self) -> tuple[tuple[Instruction, ...], dict[int, int]]:
        for position, line in enumerate(self.program.instructions):
            self.lines.append(self._rebuild(position, line))
            self.moved[position] = len(self.lines) - 1
        return tuple(self.lines), self.moved

    def _rebuild(self, position: int, line: Instruction) -> Instruction:
        if line.op == "load":
            load: Load = line.attr
            shape = self.program.captures[load.slot].shape
            modes = tuple(_mode(*self.ends[a], n) for a, n in zip(line.args, shape, strict=True))
            args = tuple(self.moved[a] for a in line.args)
            return line._replace(args=args, attr=Load(load.slot, modes))
        if line.op in ("input", "number", "cast"):
            dtype = self._narrow_type(line.dtype, [position])
            return line._replace(args=tuple(self.moved[a] for a in line.args), dtype=dtype)
        family = [a for a in line.args if self.program.instructions[a].dtype == torch.int64]
        wide = [*family, position] if line.dtype == torch.int64 else family
        narrow = self._narrow_type(torch.int64, wide)
        args = tuple(self._operand(a, narrow) if a in family else self.moved[a] for a in line.args)
        dtype = narrow if line.dtype == torch.int64 else line.dtype
        return line._replace(op=self._natural(line), args=args, dtype=dtype)

    def _narrow_type(self, dtype: torch.dtype, positions: list[int]) -> torch.dtype:
        fits = all(
            self.ends[p][0] >= _INT32.min and self.ends[p][1] <= _INT32.max for p in positions
        )
        return torch.int32 if dtype == torch.int64 and fits else dtype

    def _operand(self, position: int, dtype: torch.dtype) -> int:
        moved = self.moved[position]
        if self.lines[moved].dtype == dtype:
            return moved
        if (moved, dtype) not in self.casts:
            self.lines.append(Instruction("cast", (moved,), dtype))
            self.casts[moved, dtype] = len(self.lines) - 1
        return self.casts[moved, dtype]

    def _natural(self, line: Instruction) -> str:
        if line.op not in _NATURAL or line.dtype.is_floating_point:
            return line.op
        numerator, divisor = (self.ends[a] for a in line.args)
        return _NATURAL[line.op] if numerator[0] >= 0 and divisor[0] > 0 else line.op


def _mode(lo: float, hi: float, length: int) -> str:
    if lo >= 0 and hi < length:
        return "proven"
    return "wrap" if lo >= -length and hi < length else "check"
