"""Comparisons of a mod in a Gluon kernel, in as few instructions a pair as the machine allows.

A tile on the edge of a mask is met about once a row, and an instruction there was measured to cost
4 to 5 cycles, most likely to be fetched anew. Two things spare a third of those of a document mask.

Positions of a tile's columns are those of a thread's first column plus constants. Where positions
are compared with each other, the first column is subtracted from both sides: one side is constants.

The compiler makes two choices, one after the other, of a choice under `a & b`. But a comparison of
the machine can take a further truth: so a chain of comparisons is written down for the machine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexmod.program.ir import Instruction, Program

KEYS = "kv_idx"  # along the columns of the tiles that this is for: others came out longer
NEAR = "near_row, near_column = near(q_idx, kv_idx, corner)"  # the line that `reads_near` needs
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_TYPES = {torch.int32: ("s32", "r"), torch.int64: ("s64", "l")}  # of the machine, and its registers
_POSITIONS = {"q_idx", "kv_idx"}
_LONGEST = 6  # comparisons of a chain


class _Link(NamedTuple):
    """One comparison of a chain. `join`: "and" or "or" with the truth of those before, or ""."""

    join: str
    test: str
    dtype: torch.dtype
    args: tuple[str, ...]


class Conditions:
    """How one function spells them, of tiles whose columns are keys."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reads_near = False
        # If another needs the positions of columns, they are there anyway. Of a score: see `near`.
        is_mask = program.kind == "mask"
        self._may_read_near = is_mask and all(_is_near(program, u) for u in _uses(program, KEYS))
        self._chains: dict[str, list[_Link]] = {}  # of truths, by name

    def spelled(
        self, name: str, line: Instruction, args: tuple[str, ...]
    ) -> tuple[tuple[str, ...], str | None]:
        """The operands of an operation, and its text if that is not the usual one."""
        if self._may_read_near and _is_near(self.program, line):
            self.reads_near = True
            args = tuple("near_column" if a == KEYS else "near_row" for a in args)
        return args, self._joined(name, line, args)

    def _joined(self, name: str, line: Instruction, args: tuple[str, ...]) -> str | None:
        """The text of a truth that is a chain of comparisons, at least two."""
        dtypes = {self.program.instructions[a].dtype for a in line.args}
        if line.op in _COMPARISONS and len(dtypes) == 1 and dtypes <= _TYPES.keys():
            self._chains[name] = [_Link("", line.op, dtypes.pop(), args)]
        if line.op not in ("and", "or") or not self._chains.keys() >= {*args}:
            return None
        chains = sorted((self._chains[a] for a in args), key=lambda c: _joins(c) <= {line.op})
        chain = [*chains[0], chains[1][0]._replace(join=line.op), *chains[1][1:]]
        if len(chain) > _LONGEST or not _joins(chains[1]) <= {line.op}:
            return None
        self._chains[name] = chain
        return _text(chain)


def _uses(program: Program, index: str) -> list[Instruction]:
    lines = program.instructions
    return [line for line in lines if any(_name(lines[a]) == index for a in line.args)]


def _is_near(program: Program, line: Instruction) -> bool:
    """Whether it only asks which of two positions comes first."""
    names = {_name(program.instructions[a]) for a in line.args}
    return names == _POSITIONS and line.op in _COMPARISONS


def _name(line: Instruction) -> str:
    return str(line.attr) if line.op == "input" else ""


def _joins(chain: list[_Link]) -> set[str]:
    return {link.join for link in chain[1:]}


def _text(chain: list[_Link]) -> str:
    """The machine's instructions, and what they are about."""
    steps, kinds = [], ["=b"]
    for n, (join, test, dtype, _) in enumerate(chain):
        kind, register = _TYPES[dtype]
        found = "$0" if n == len(chain) - 1 else "p"
        word, truth = (f"{join}.", ", p") if join else ("", "")
        steps.append(f"setp.{test}.{word}{kind} {found}, ${2 * n + 1}, ${2 * n + 2}{truth};")
        kinds += [register, register]
    operands = ", ".join(a for link in chain for a in link.args)
    return f'truth(({operands}), "{{ .reg .pred p; {" ".join(steps)} }}", "{",".join(kinds)}")'
