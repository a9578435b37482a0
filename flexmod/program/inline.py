"""A program called like the function that it was traced from: inside of a mod, or on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexmod.errors import TraceError
from flexmod.program.evaluate import evaluate, raise_if_invalid
from flexmod.program.ir import ARGUMENTS, Instruction, Program, interpret
from flexmod.program.ops import TABLE
from flexmod.program.proxy import Proxy, Traced, recorder_of
from flexmod.program.record import Recorder


def call(program: Program, *arguments: Any) -> Any:
    """The value of a mask_mod or score_mod: recorded for traced arguments, a tensor for tensors."""
    names = ARGUMENTS[program.kind]
    if len(arguments) != len(names):
        raise TraceError(f"{program.name} takes ({', '.join(names)}), got {len(arguments)} values")
    inputs = dict(zip(names, arguments, strict=True))
    if torch.compiler.is_dynamo_compiling():
        return _spelled_out(program, inputs)
    recorder = recorder_of(arguments)
    if recorder is not None:
        return inline(recorder, program, {n: _traced(recorder, x) for n, x in inputs.items()})
    (value,), invalid = evaluate(program, {n: torch.as_tensor(x) for n, x in inputs.items()})
    raise_if_invalid(program, invalid, None)
    return value


def _spelled_out(program: Program, inputs: Mapping[str, Any]) -> Any:
    """The program as torch calls, one by one: what Dynamo records of a mod that calls it."""
    values: list[Any] = []
    for line in program.instructions:
        args = [values[a] for a in line.args]
        match line.op:
            case "input":
                value = inputs[line.attr]
            case "number":
                value = torch.full((), program.numbers[line.attr], dtype=line.dtype, device="cpu")
            case "load":
                tensor = program.captures[line.attr.slot]
                value = (tensor[tuple(args)] if args else tensor).to(line.dtype)
            case "cast":
                value = args[0].to(line.dtype)
            case "round_to":
                value = args[0].to(line.attr).to(line.dtype)
            case _:
                value = TABLE[line.op].evaluate(*args)
        values.append(value)
    return values[program.outputs[0]]


def _traced(recorder: Recorder, value: Any) -> Any:
    """An argument of a call inside of a mod; a number or a tensor too."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, torch.Tensor):
        return recorder.load(value, [])
    return recorder.number(value, torch.int64 if isinstance(value, int) else recorder.real)


def inline(recorder: Recorder, program: Program, inputs: Mapping[str, Any]) -> Proxy:
    """Record a program again, its inputs replaced."""

    def leaf(position: int, line: Instruction, args: tuple[Proxy, ...]) -> Proxy:
        if line.op == "input":
            return inputs[line.attr]
        if line.op == "number":
            return recorder.number(program.numbers[line.attr], line.dtype)
        value = recorder.load(program.captures[line.attr.slot], list(args))
        if position in program.sites:  # the user's own line
            recorder.sites[value.position] = program.sites[position]  # type: ignore[assignment]
        return value

    def apply(line: Instruction, args: tuple[Proxy, ...]) -> Proxy:
        return recorder.emit(line.op, tuple(a.position for a in args), line.dtype, line.attr)

    return interpret(program, leaf, apply)[program.outputs[0]]
