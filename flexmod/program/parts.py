"""What a mod knows of a row or a column alone, apart from what it does with pairs.

The tensor cores of Hopper leave a tile of scores so that each thread holds two rows and a quarter
of the columns. What costs and depends on a column alone would be computed, or loaded, by 32 threads
at once; what depends on a row alone, anew for each tile. So it is computed apart: of columns on
a vector of their positions, one a thread, and spread over the tile where it meets others; of rows
ahead of the tiles. Cheap arithmetic stays: spreading is a trip through shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexmod.program.dependence import Dependence, dependence
from flexmod.program.ir import Instruction, Program, rebuilt

ROWS, COLUMNS = "of_rows", "of_columns"  # operations of `Parts.pairs` (attr: which result)
_CHEAP = frozenset(
    """input number add sub mul neg abs sign minimum maximum amin amax eq ne lt le gt ge detach
    and or xor not invert lshift rshift where""".split()
)
_HELD = 6  # registers of a thread for what is known of its rows; a thread has two


class Parts(NamedTuple):
    """Three programs for one: the results of two are read by the third."""

    rows: Program
    columns: Program
    pairs: Program


def split(program: Program, index: str) -> Parts:
    """The parts of a specialized mod; `index` is the one along the columns, q_idx or kv_idx."""
    found = dependence(program)
    costs = _costs(program)
    sides = [_side(d, index) if c else None for d, c in zip(found, costs, strict=True)]
    border = _border(program, sides)
    while _registers(program, found, rows := [n for n in border if sides[n] == ROWS]) > _HELD:
        sides[rows[-1]] = None
        border = _border(program, sides)
    columns = [n for n in border if sides[n] == COLUMNS]
    lines = list(program.instructions)
    for op, results in ((ROWS, rows), (COLUMNS, columns)):
        for place, n in enumerate(results):
            lines[n] = Instruction(op, (), lines[n].dtype, place)
    return Parts(
        rebuilt(program, program.instructions, rows)[0],
        rebuilt(program, program.instructions, columns)[0],
        rebuilt(program, lines, program.outputs)[0],
    )


def _side(found: Dependence, index: str) -> str | None:
    if found.inputs <= {index, "b", "h"} and index in found.inputs:
        return COLUMNS
    row = {"q_idx": "kv_idx", "kv_idx": "q_idx"}[index]
    return ROWS if found.inputs and found.inputs <= {row, "b", "h"} else None


def _border(program: Program, sides: list[str | None]) -> list[int]:
    """Lines of rows and of columns that pairs, or the results, read."""
    needed, border = set(program.outputs), []
    for n in range(len(program.instructions) - 1, -1, -1):
        if n in needed and sides[n]:
            border.append(n)
        elif n in needed:
            needed.update(program.instructions[n].args)
    return border[::-1]


def _registers(program: Program, found: list[Dependence], rows: list[int]) -> int:
    """What results of rows, or of a head, take of a thread's registers."""
    words = [max(program.instructions[n].dtype.itemsize // 4, 1) for n in rows]
    counts = [1 if found[n].inputs <= {"b", "h"} else 2 for n in rows]
    return sum(w * c for w, c in zip(words, counts, strict=True))


def _costs(program: Program) -> list[bool]:
    """Which lines are dearer than a trip through shared memory, by themselves or what they read."""
    found: list[bool] = []
    for line in program.instructions:
        found.append(is_dear(program, line) or any(found[a] for a in line.args))
    return found


def is_dear(program: Program, line: Instruction) -> bool:
    """Whether a line by itself costs more than an addition."""
    if line.op == "cast":
        source = program.instructions[line.args[0]].dtype
        floats = source.is_floating_point, line.dtype.is_floating_point
        return floats[0] != floats[1] and source != torch.bool
    return line.op not in _CHEAP
