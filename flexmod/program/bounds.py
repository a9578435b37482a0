"""A program on intervals: from ranges of b, h, q_idx, kv_idx to the range of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
