"""A program on tensors: what it means, and how the reference and CPU engines run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.errors import IndexRangeError
from flexmod.program.ir import Instruction, Load, Program, interpret
from flexmod.program.ops import TABLE
from flexmod.program.transforms import is_wrapped


class Evaluation(NamedTuple):
    """The results, and per element the load (position + 1) that left its tensor, 0 if none did."""

    values: tuple[Tensor, ...]
    invalid: Tensor | None


def on_grid(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> dict[str, Tensor]:
    """Inputs of `evaluate` for all combinations of four 1-D index tensors: [b, h, q, kv]."""
    return {
        "b": b[:, None, None, None],
        "h": h[:, None, None],
        "q_idx": q_idx[:, None],
        "kv_idx": kv_idx,
    }


def evaluate(program: Program, inputs: Mapping[str, Tensor]) -> Evaluation:
    """Run a program on tensors that broadcast against each other.

    Args:
        program: a traced mod; loads marked "check" by `specialize` are looked at, not trusted.
        inputs: `score` and index tensors by name, of any shapes that broadcast.

    Returns:
        The values, of the broadcast shape or of ones that expand to it (an axis that nothing
        depends on stays short), and where a load was out of range.
    """
    invalid: list[Tensor] = []

    def leaf(position: int, line: Instruction, args: tuple[Tensor, ...]) -> Tensor:
        if line.op == "number":
            number = program.numbers[line.attr]
            return torch.tensor(number, dtype=line.dtype, device="cpu")
        if line.op == "input":
            return inputs[str(line.attr)].to(line.dtype)
        load: Load = line.attr
        tensor = program.captures[load.slot]
        indices = []
        for index, mode, length in zip(args, load.modes, tensor.shape, strict=True):
            if mode == "check":
                outside = (index < -length) | (index >= length)
                invalid.append(outside * (position + 1))
                index = index.clamp(-length, length - 1)
            indices.append(index.long())
        return tensor[tuple(indices)].to(line.dtype) if indices else tensor.to(line.dtype)

    def apply(line: Instruction, args: tuple[Tensor, ...]) -> Tensor:
        if line.op == "cast":
            return args[0].to(line.dtype)
        if line.op == "round_to":
            return args[0].to(line.attr).to(line.dtype)
        return TABLE[line.op].evaluate(*args)

    lines = interpret(program, leaf, apply)
    values = tuple(lines[n] for n in program.outputs)
    if not invalid:
        return Evaluation(values, None)
    worst = invalid[0]
    for other in invalid[1:]:
        worst = torch.maximum(worst, other)
    return Evaluation(values, worst)


def raise_if_invalid(program: Program, invalid: Tensor | None, counts: Tensor | None) -> None:
    """Raise for a load out of range where `counts` (visible positions; None: all) is true."""
    if invalid is None or is_wrapped(invalid):  # under torch.vmap nothing can be read
        return
    position = (
        int((invalid if counts is None else invalid * counts).max()) if invalid.numel() else 0
    )
    if position:
        load: Load = program.instructions[position - 1].attr
        shape = list(program.captures[load.slot].shape)
        site = program.sites.get(position - 1, "unknown place")
        raise IndexRangeError(
            f"{site}\n  {program.name}: an index is outside of the captured tensor of shape {shape}"
        )
