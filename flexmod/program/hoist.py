"""Integer arithmetic moved off the tile: to the few values that depend on one index alone.

A kernel holds q_idx as a column and kv_idx as a row, so that an operation on either costs one
side of a tile, and an operation on both costs the whole tile. Four rewrites spare the latter;
each is made only where intervals prove that no result changes:

    a sum of integers     terms of q_idx first, then those of kv_idx, then one operation on both
    a comparison of sums  terms of q_idx against terms of kv_idx
    a float of integers   floats of its terms: a conversion costs two to four float additions
    a needless clamp      what it clamps
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from flexmod.program.dependence import dependence
from flexmod.program.ir import Instruction, Program, rebuilt

_INT32_MAX = torch.iinfo(torch.int32).max
_WIDE = (torch.int32, torch.int64)
_SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_EXACT = ("abs", "minimum", "maximum", "where", "mul")  # the same on floats, while they hold it

Form = dict[int, int]  # a sum: line of the given program -> 1 or -1
Signed = tuple[int, int]  # a new line, and the sign that it is meant with


def hoist(program: Program, ends: Sequence[tuple[float, float]]) -> tuple[Program, dict[int, int]]:
    """The same program with fewer operations on whole tiles.

    Args:
        program: a traced mod.
        ends: the interval of each of its lines.

    Returns:
        The program, and the place in it of each line that is still needed.
    """
    hoister = _Hoister(program, ends)
    for position in range(len(program.instructions)):
        hoister.rebuild(position)
    return hoister.finish()


class _Hoister:
    """Rebuilds a program line by line. Equal lines are made once."""

    def __init__(self, program: Program, ends: Sequence[tuple[float, float]]) -> None:
        self.program, self.instructions, self.ends = program, program.instructions, ends
        self.inputs = [found.inputs for found in dependence(program)]
        self.forms: list[Form] = []  # of each line; itself if it is no sum
        self.moved: dict[int, int] = {}  # position in the program -> position in `lines`
        self.lines: list[Instruction] = []
        self.numbers = list(program.numbers)
        self.known: dict[Instruction, int] = {}
        self.split: dict[tuple[int, torch.dtype], bool] = {}
        self.floats: dict[tuple[int, torch.dtype], int] = {}
        self.zeros: dict[torch.dtype, int] = {}

    def rebuild(self, position: int) -> None:
        line = self.instructions[position]
        self.forms.append(self._form(position))
        if self._is_sum(position):
            new = self._plain(*self._sum(self.forms[position], line.dtype), line.dtype)
        elif line.op in _COMPARISONS:
            new = self._comparison(line)
        elif line.op == "cast" and self._is_spared(line):
            new = self._float(line.args[0], line.dtype)
        elif line.op in ("minimum", "maximum") and line.dtype in _WIDE:
            new = self._extreme(line)
        else:
            new = self._copy(line)
        self.moved[position] = new

    def finish(self) -> tuple[Program, dict[int, int]]:
        """Only what the results need, renumbered."""
        outputs = [self.moved[n] for n in self.program.outputs]
        program = replace(self.program, numbers=tuple(self.numbers))
        made, order = rebuilt(program, self.lines, outputs)
        return made, {old: order[new] for old, new in self.moved.items() if new in order}

    def _emit(self, line: Instruction) -> int:
        if line not in self.known:
            self.known[line] = len(self.lines)
            self.lines.append(line)
        return self.known[line]

    def _copy(self, line: Instruction) -> int:
        return self._emit(line._replace(args=tuple(self.moved[a] for a in line.args)))

    def _is_tile(self, position: int) -> bool:
        """Whether a line has a value of its own for each pair of a query and a key."""
        inputs = self.inputs[position]
        return {"q_idx", "kv_idx"} <= inputs or not inputs.isdisjoint(("score", "grad"))

    def _largest(self, form: Form) -> float:
        """No sum of some of the terms, in any order, is larger in magnitude."""
        return sum(max(abs(end) for end in self.ends[p]) for p in form)

    # sums and comparisons of integers

    def _form(self, position: int) -> Form:
        """A line as a sum, if it is one of whole tiles that stays within 32 bits."""
        line = self.instructions[position]
        if line.op in _SIGNS and line.dtype in _WIDE and self._is_tile(position):
            form = self._merged(line.args, _SIGNS[line.op])
            if form is not None:
                return form
        return {position: 1}

    def _is_sum(self, position: int) -> bool:
        return self.forms[position] != {position: 1}

    def _merged(self, lines: Sequence[int], signs: Sequence[int]) -> Form | None:
        found: Counter[int] = Counter()
        for position, sign in zip(lines, signs, strict=True):
            for term, own in self.forms[position].items():
                found[term] += sign * own
        form = {term: sign for term, sign in found.items() if sign}
        single = form and all(abs(sign) == 1 for sign in form.values())
        return form if single and self._largest(form) <= _INT32_MAX else None

    def _sides(self, form: Form) -> list[list[int]]:
        """Terms without kv_idx, terms of kv_idx, and terms that are tiles."""
        sides: list[list[int]] = [[], [], []]
        for term in form:
            side = 2 if self._is_tile(term) else 1 if "kv_idx" in self.inputs[term] else 0
            sides[side].append(term)
        return sides

    def _sum(self, form: Form, dtype: torch.dtype) -> Signed:
        groups = [
            self._total([(self.moved[p], form[p]) for p in side], dtype)
            for side in self._sides(form)
            if side
        ]
        return self._total(groups, dtype)

    def _total(self, terms: list[Signed], dtype: torch.dtype, attr: str | None = None) -> Signed:
        """A sum that begins with a positive term; if there is none, minus a sum."""
        terms = sorted(terms, key=lambda term: -term[1])
        total, sign = terms[0]
        for line, own in terms[1:]:
            op = "add" if own == sign else "sub"
            total = self._emit(Instruction(op, (total, line), dtype, attr))
        return total, sign

    def _plain(self, line: int, sign: int, dtype: torch.dtype) -> int:
        return line if sign > 0 else self._emit(Instruction("neg", (line,), dtype))

    def _comparison(self, line: Instruction) -> int:
        """x - y against 0, as what depends on q_idx against what depends on kv_idx."""
        dtype = self.instructions[line.args[0]].dtype
        form = self._merged(line.args, (1, -1)) if dtype in _WIDE else None
        rows, keys, tiles = self._sides(form or {})
        if form is None or tiles or not rows or not keys:
            return self._copy(line)
        (row, sign), (key, other) = (
            self._total([(self.moved[p], form[p]) for p in side], dtype) for side in (rows, keys)
        )
        if sign == other:
            row, sign = self._plain(row, -1, dtype), -sign
        return self._emit(line._replace(args=(row, key) if sign > 0 else (key, row)))

    def _extreme(self, line: Instruction) -> int:
        """A minimum or maximum, or the operand that it always is."""
        for one, other in (line.args, line.args[::-1]):
            (low, high), (lowest, highest) = self.ends[one], self.ends[other]
            if high <= lowest if line.op == "minimum" else low >= highest:
                return self.moved[one]
        return self._copy(line)

    # floats of integers

    def _is_spared(self, cast: Instruction) -> bool:
        """Whether a conversion is of a tile and can be done before."""
        (source,) = cast.args
        return self._is_tile(source) and self._splits(source, cast.dtype)

    def _splits(self, position: int, dtype: torch.dtype) -> bool:
        """Whether the float of an integer needs no conversion of a tile and no rounding."""
        if (position, dtype) not in self.split:
            self.split[position, dtype] = self._may_split(position, dtype)
        return self.split[position, dtype]

    def _may_split(self, position: int, dtype: torch.dtype) -> bool:
        line, form = self.instructions[position], self.forms[position]
        if not dtype.is_floating_point or line.dtype not in _WIDE:
            return False
        if self._largest(form) > 2 / torch.finfo(dtype).eps:
            return False
        if self._is_sum(position):
            return all(self._splits(p, dtype) for p in form)
        values = line.args[1:] if line.op == "where" else line.args
        exact = line.op in _EXACT and all(self._splits(p, dtype) for p in values)
        return exact or not self._is_tile(position)

    def _float(self, position: int, dtype: torch.dtype) -> int:
        """The float of a line that `_splits`. It is never -0.0, as the float of an integer."""
        if (position, dtype) not in self.floats:
            self.floats[position, dtype] = self._new_float(position, dtype)
        return self.floats[position, dtype]

    def _new_float(self, position: int, dtype: torch.dtype) -> int:
        line, form = self.instructions[position], self.forms[position]
        if self._is_sum(position):
            return self._float_sum(form, line.dtype, dtype)
        if not self._is_tile(position):
            return self._exactly("cast", (self.moved[position],), dtype)
        if line.op == "where":
            condition, *values = line.args
            args = (self.moved[condition], *(self._float(p, dtype) for p in values))
            return self._exactly("where", args, dtype)
        found = self._exactly(line.op, tuple(self._float(p, dtype) for p in line.args), dtype)
        if line.op == "mul" and self._may_be_minus_zero(*line.args):
            return self._exactly("add", (found, self._zero(dtype)), dtype)
        return found

    def _float_sum(self, form: Form, whole: torch.dtype, dtype: torch.dtype) -> int:
        groups = []
        for side in self._sides(form)[:2]:
            if side:
                line, sign = self._total([(self.moved[p], form[p]) for p in side], whole)
                groups.append((self._exactly("cast", (line,), dtype), sign))
        tiles = self._sides(form)[2]
        groups += [(self._float(p, dtype), form[p]) for p in tiles]
        total, sign = self._total(groups, dtype, "exact")
        return total if sign > 0 else self._exactly("sub", (self._zero(dtype), total), dtype)

    def _exactly(self, op: str, args: tuple[int, ...], dtype: torch.dtype) -> int:
        return self._emit(Instruction(op, args, dtype, "exact"))

    def _zero(self, dtype: torch.dtype) -> int:
        if dtype not in self.zeros:
            self.numbers.append(0.0)
            line = Instruction("number", (), dtype, len(self.numbers) - 1)
            self.zeros[dtype] = self._emit(line)
        return self.zeros[dtype]

    def _may_be_minus_zero(self, x: int, y: int) -> bool:
        """Of a product of floats: 0 times a negative number."""
        (low, high), (least, most) = self.ends[x], self.ends[y]
        return (low <= 0 <= high and least < 0) or (least <= 0 <= most and low < 0)
