"""What each line of a program depends on, and whether only through kv_idx - q_idx."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexmod.program.ir import LEAVES, Instruction, Program, interpret


class Dependence(NamedTuple):
    """Inputs that a line reads.

    by_difference: q_idx and kv_idx only enter as their difference (also true if neither does).
    linear: (coefficient of q_idx, of kv_idx) while the line is a linear form of them, else None.
    """

    inputs: frozenset[str]
    by_difference: bool
    linear: tuple[int, int] | None

    @property
    def reads_both(self) -> bool:
        return {"q_idx", "kv_idx"} <= self.inputs


ALONG = "of_diagonals"  # an operation: what was computed apart of kv_idx - q_idx (attr: its place)
_UNITS = {"q_idx": (1, 0), "kv_idx": (0, 1)}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_HOLDING = (torch.int32, torch.int64, torch.float32, torch.float64)  # any index, if exact


_known: dict[int, list[Dependence]] = {}


def dependence(program: Program) -> list[Dependence]:
    """One entry a line; remembered."""
    if program.key not in _known:
        _known[program.key] = _dependence(program)
    return _known[program.key]


def _dependence(program: Program) -> list[Dependence]:
    def leaf(_: int, line: Instruction, args: tuple[Dependence, ...]) -> Dependence:
        if line.op == "input":
            name = str(line.attr)
            linear = _UNITS.get(name, (0, 0))
            return Dependence(frozenset([name]), linear == (0, 0), linear)
        if line.op == "number":
            return Dependence(frozenset(), True, (0, 0))
        return _joined(args, None)

    def apply(line: Instruction, args: tuple[Dependence, ...]) -> Dependence:
        if line.op == ALONG:
            return Dependence(frozenset(_UNITS), True, None)
        found = _joined(args, _linear(line, args))
        if line.op in _COMPARISONS:  # of a - b with 0
            shifted = _linear(line._replace(op="sub"), args)
            along = shifted is not None and shifted[0] == -shifted[1]
            found = found._replace(by_difference=found.by_difference or along)
        return found

    return interpret(program, leaf, apply)


def _joined(args: tuple[Dependence, ...], linear: tuple[int, int] | None) -> Dependence:
    inputs = frozenset().union(*(a.inputs for a in args))
    by_difference = all(a.by_difference for a in args)
    if linear is not None:
        by_difference = by_difference or linear[0] == -linear[1]
    return Dependence(inputs, by_difference, linear)


def _linear(line: Instruction, args: tuple[Dependence, ...]) -> tuple[int, int] | None:
    """Of integers, and of floats without rounding."""
    forms = [a.linear for a in args]
    if None in forms:
        return None
    exact = not line.dtype.is_floating_point or line.attr == "exact"
    match line.op, forms:
        case ("add", [(a, b), (c, d)]) if exact:
            return a + c, b + d
        case ("sub", [(a, b), (c, d)]) if exact:
            return a - c, b - d
        case ("neg", [(a, b)]) if exact:
            return -a, -b
        case ("cast", [(a, b)]) if exact and line.dtype in _HOLDING:
            return a, b
    return (0, 0) if all(f == (0, 0) for f in forms) else None


_gathering: dict[int, bool] = {}
_effort: dict[int, int] = {}
_LONG = {"floordiv": 6, "mod": 6, "pow": 8, "expm1": 6, "log1p": 6, "round": 4}


def effort(program: Program) -> int:
    """About how many instructions a program spends on each pair of positions."""
    if program.key not in _effort:
        pairs = zip(program.instructions, dependence(program), strict=True)
        _effort[program.key] = sum(
            _LONG.get(line.op, 1)
            for line, found in pairs
            if line.op not in LEAVES and (found.reads_both or "score" in found.inputs)
        )
    return _effort[program.key]


def gathers(program: Program) -> bool:
    """Whether a captured tensor is read at an index that depends on q_idx and kv_idx at once."""
    if program.key not in _gathering:
        pairs = zip(program.instructions, dependence(program), strict=True)
        _gathering[program.key] = any(i.op == "load" and d.reads_both for i, d in pairs)
    return _gathering[program.key]
