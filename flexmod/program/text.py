"""Programs as text: what files, exported models and compiled graphs carry of a mod."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import ArgumentError
from flexmod.program.ir import LEAVES, Instruction, Load, Program
from flexmod.program.ops import CONVERSIONS, TABLE

_structures: dict[int, str] = {}


def structure(program: Program) -> str:
    """All of a program but its numbers, captured tensors and the user's lines."""
    if program.key not in _structures:
        lines = [
            [line.op, line.args, _name(line.dtype), _written(line)] for line in program.instructions
        ]
        _structures[program.key] = json.dumps([program.kind, lines, program.outputs])
    return _structures[program.key]


def restored(
    text: str,
    name: str,
    numbers: Sequence[float | int],
    captures: Sequence[Tensor],
    sites: Mapping[int, object] | None = None,
) -> Program:
    """The program of a `structure`.

    Raises:
        ArgumentError: the text is not one that `structure` wrote.
    """
    try:
        kind, lines, outputs = json.loads(text)
        instructions = tuple(_read(*line) for line in lines)
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(f"the saved program {name} is damaged: {error}") from None
    for position, line in enumerate(instructions):
        known = line.op in TABLE or line.op in (*LEAVES, *CONVERSIONS)
        earlier = all(0 <= a < position for a in line.args)
        if not (known and earlier and _holds(line, len(numbers), len(captures))):
            raise ArgumentError(f"the saved program {name} is damaged at line {position}")
    return Program(
        kind, name, instructions, tuple(outputs), tuple(numbers), tuple(captures), sites or {}
    )


def held(captures: Sequence[Tensor], learned: Container[int] = ()) -> list[int]:
    """Slots of the captured tensors that `with_captures` keeps as tensors."""
    return [slot for slot, x in enumerate(captures) if is_held(x) or slot in learned]


def is_held(captured: Tensor) -> bool:
    """Whether a captured tensor is one for a kernel too; the others are numbers."""
    return captured.ndim > 0 or captured.device.type != "cpu"


def with_captures(
    program: Program, captures: Sequence[Tensor], learned: Container[int] = ()
) -> Program:
    """The program on these tensors; 0-dim ones on the CPU become numbers, but for `learned`."""
    moved = {old: new for new, old in enumerate(held(captures, learned))}
    if len(moved) == len(captures):
        kinds = tuple((x.dtype, x.ndim) for x in captures)
        return _of_kinds(program, kinds).with_captures(tuple(x.detach() for x in captures))
    lines, numbers = list(program.instructions), list(program.numbers)
    for position, line in enumerate(lines):
        if line.op != "load":
            continue
        slot, modes = line.attr
        if slot in moved:
            lines[position] = line._replace(attr=Load(moved[slot], modes))
        else:
            lines[position] = line._replace(op="number", attr=len(numbers))
            numbers.append(captures[slot].item())
    return replace(
        program,
        instructions=tuple(lines),
        numbers=tuple(numbers),
        captures=tuple(captures[slot].detach() for slot in moved),
    )


@lru_cache(maxsize=512)
def _of_kinds(program: Program, kinds: tuple[tuple[torch.dtype, int], ...]) -> Program:
    """The program on empty tensors of these dtypes and ranks: its structure is worked out once."""
    empty = tuple(torch.empty([0] * ndim, dtype=dtype) for dtype, ndim in kinds)
    return replace(program, captures=empty)


def _holds(line: Instruction, numbers: int, captures: int) -> bool:
    """Whether the number or tensor that a leaf names exists."""
    if line.op == "number":
        return 0 <= line.attr < numbers
    return line.op != "load" or 0 <= line.attr.slot < captures


def _written(line: Instruction) -> object:
    return _name(line.attr) if isinstance(line.attr, torch.dtype) else line.attr


def _read(op: str, args: list[int], dtype: str, attr: Any) -> Instruction:
    if op == "load":
        attr = Load(attr[0], tuple(attr[1]))
    elif op == "round_to":
        attr = getattr(torch, str(attr))
    return Instruction(op, tuple(args), getattr(torch, dtype), attr)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
