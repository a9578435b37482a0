"""Masks made from masks as programs: other indices shown, or several joined into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flexmod.program import Program
from flexmod.program.inline import inline
from flexmod.program.ir import INDICES
from flexmod.program.record import Recorder

Indices = Mapping[str, Any]  # traced values by name
Change = Callable[[Any], Any]  # of one index


def joined(
    name: str,
    programs: tuple[Program, ...],
    device: torch.device,
    make: Callable[[Indices, Callable[[Program, Indices], Any]], Any],
) -> Program:
    """A mask written in terms of other masks.

    `make(indices, call)` computes it with operators on `indices`; `call(program, indices)` is
    the value of one of the programs at other indices.
    """
    recorder = Recorder(device)
    indices = {name: recorder.emit("input", (), torch.int64, name) for name in INDICES}
    result = make(indices, lambda program, at: inline(recorder, program, at))
    return recorder.program("mask", name, result)


def reindexed(program: Program, device: torch.device, **changes: Change) -> Program:
    """The mask, shown `changes[index](index)` in place of an index that it reads."""
    wanted = {name: change for name, change in changes.items() if name in program.reads}
    if not wanted:
        return program

    def make(indices: Indices, call: Callable[[Program, Indices], Any]) -> Any:
        moved = {name: change(indices[name]) for name, change in wanted.items()}
        return call(program, {**indices, **moved})

    return joined(program.name, (program,), device, make)


def constant(value: int) -> Change:
    """An index that is always `value`."""
    return lambda index: index.recorder.number(value, torch.int64)


def within(length: int, start: int = 0) -> Change:
    """An index counted from `start`, and kept inside [0, length)."""
    return lambda index: torch.clamp(index - start, 0, length - 1)
