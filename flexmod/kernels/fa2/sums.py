"""How the backward kernels sum the gradients of captured tensors.

Each load of a captured tensor is of one kind, by what its index depends on:

plane     b and h only (a slope a head): one sum a program
row       q_idx too: one sum a row            column  kv_idx too: one sum a column
diagonal  only kv_idx - q_idx (a relative bias): one sum a diagonal of a tile, then an atomic add
element   anything else: an atomic add an element
product   a plane whose sum comes with the gradients of queries (hopper, see `fa2.products`)

The sums go to buffers; `fa2.scatter` adds these to the tensors' gradients by the indices. What is
written into the kernels for this is in `fa2.sums_text`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmod.kernels.problem import Problem
from flexmod.kernels.tuning import Tiles
from flexmod.program import Program
from flexmod.program.dependence import dependence
from flexmod.program.gradient import LoadGradient

ATOMIC = frozenset({"diagonal", "element"})
_FINITE = {"input", "add", "sub", "mul", "neg", "cast"}


@dataclass(frozen=True)
class Plan:
    """The loads of a gradient program, and the kind of each.

    finite: of each, whether it receives a finite number wherever scores and gradients are finite.
    """

    loads: tuple[LoadGradient, ...] = ()
    kinds: tuple[str, ...] = ()
    finite: tuple[bool, ...] = ()

    @property
    def uses_atomics(self) -> bool:
        return not ATOMIC.isdisjoint(self.kinds)

    def buffers(
        self, problem: Problem, tiles: Tiles, plane: int, adding: frozenset[str] = ATOMIC
    ) -> Buffers:
        """Of the sums of each load, `plane` of them a plane; kernels add to kinds in `adding`."""
        planes, margin = (problem.batch, problem.heads), tiles.q + tiles.kv
        rows, keys = problem.q_len, problem.kv_len
        shapes = {
            "plane": (*planes, plane),
            "product": (*planes, rows),
            "row": (*planes, rows),
            "column": (*planes, keys),
            "diagonal": (*planes, rows + keys + 2 * margin),
        }
        captures = problem.score.captures if problem.score else ()
        pairs = zip(self.loads, self.kinds, strict=True)
        found = [shapes.get(kind) or (captures[load.slot].numel(),) for load, kind in pairs]
        inside = slice(margin + 1, margin + rows + keys)
        zeroed, dtype = tuple(kind in adding for kind in self.kinds), problem.work_dtype
        return Buffers(self.kinds, tuple(found), zeroed, inside, dtype, problem.device)

    def sizes(self, problem: Problem) -> list[int]:
        """What `sizes` of the text stand for."""
        assert problem.score is not None or not self.loads
        captures = problem.score.captures if problem.score else ()
        pairs = zip(self.loads, self.kinds, strict=True)
        return [n for load, kind in pairs if kind == "element" for n in captures[load.slot].shape]


@dataclass(frozen=True)
class Buffers:
    """Where the kernels leave their sums: one tensor a load.

    zeroed: whether kernels add to one; they write the others throughout.
    inside: those of a diagonal buffer that are diagonals of the call; tiles that stick out of it
    write beside them.
    """

    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    zeroed: tuple[bool, ...]
    inside: slice
    dtype: torch.dtype
    device: torch.device

    def make(self) -> list[Tensor]:
        return [
            (torch.zeros if zeroed else torch.empty)(shape, dtype=self.dtype, device=self.device)
            for shape, zeroed in zip(self.shapes, self.zeroed, strict=True)
        ]

    def inner(self, n: int, value: Tensor) -> Tensor:
        """The part of a buffer that belongs to the call."""
        return value[..., self.inside] if self.kinds[n] == "diagonal" else value

    def inner_shape(self, n: int) -> tuple[int, ...]:
        *planes, last = self.shapes[n]
        if self.kinds[n] == "diagonal":
            last = self.inside.stop - self.inside.start
        return (*planes, last)


NOTHING = Plan()


def plan(problem: Problem) -> Plan:
    """The kinds of the loads of a problem's gradient."""
    if problem.gradient is None:
        return NOTHING
    program, loads = problem.gradient.program, problem.gradient.loads
    lines = dependence(program)
    kinds = tuple(_kind(program, load, lines) for load in loads)
    return Plan(loads, kinds, tuple(_is_finite(program, load.value) for load in loads))


def _kind(program: Program, load: LoadGradient, lines: list[Any]) -> str:
    indices = [lines[program.outputs[i]] for i in load.indices]
    inputs = frozenset().union(*(i.inputs for i in indices))
    if inputs & {"score", "grad"}:
        return "element"
    match "q_idx" in inputs, "kv_idx" in inputs:
        case False, False:
            return "plane"
        case True, False:
            return "row"
        case False, True:
            return "column"
    return "diagonal" if all(i.by_difference for i in indices) else "element"


def _is_finite(program: Program, output: int) -> bool:
    """By its operations: sums and products of inputs; captured tensors may hold infinities."""
    needed = {program.outputs[output]}
    for position in range(max(needed), -1, -1):
        if position in needed:
            needed.update(program.instructions[position].args)
    return all(program.instructions[n].op in _FINITE for n in needed)
