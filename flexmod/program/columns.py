"""What a mod knows of a column alone, computed once a column instead of in every thread.

The tensor cores of Hopper leave a tile of scores so that each thread holds a few rows and a quarter
of the columns: a value that depends on the column is computed, or loaded, by 32 threads at once.
Here such a value is computed on `column` instead, the positions as a vector with one element a
thread, and `spread` to the tile where it meets others. Cheap arithmetic stays: spreading is a trip
through shared memory.
"""

from __future__ import annotations

import torch

from flexmod.program.dependence import Dependence, dependence
from flexmod.program.ir import Instruction, Program, rebuilt

INPUT = "column"  # the index of the columns, a vector
_CHEAP = frozenset(
    """input number add sub mul neg abs sign minimum maximum amin amax eq ne lt le gt ge detach
    and or xor not invert lshift rshift where""".split()
)


def flattened(program: Program, index: str) -> Program:
    """The same program with what costs and depends on `index`, b and h alone computed flat.

    Args:
        program: a specialized mod.
        index: the one along the columns, q_idx or kv_idx.
    """
    alone = frozenset((index, "b", "h"))
    lines: dict[Instruction, int] = {}  # equal lines are made once
    flat: list[int] = []  # of each line: its place in `lines`, on columns (or of a scalar)
    tile: list[int] = []  # on the tile
    costs: list[bool] = []

    def add(line: Instruction) -> int:
        return lines.setdefault(line, len(lines))

    for line, found in zip(program.instructions, dependence(program), strict=True):
        of_column = index in found.inputs and found.inputs <= alone
        costs.append(of_column and (_costs(program, line) or any(costs[a] for a in line.args)))
        on_tile = line._replace(args=tuple(tile[a] for a in line.args))
        on_columns = line._replace(args=tuple(flat[a] for a in line.args))
        if line == Instruction("input", (), line.dtype, index):
            on_columns = line._replace(attr=INPUT)
        flat.append(add(on_columns) if of_column else add(on_tile))
        tile.append(
            add(Instruction("spread", (flat[-1],), line.dtype)) if costs[-1] else add(on_tile)
        )
    return rebuilt(program, list(lines), [tile[n] for n in program.outputs])[0]


def is_flat(found: Dependence) -> bool:
    """Whether a load of a flattened program is of one element a column."""
    return INPUT in found.inputs and found.inputs <= {INPUT, "b", "h"}


def _costs(program: Program, line: Instruction) -> bool:
    """Whether a line is dearer than what it takes to spread it."""
    if line.op == "cast":
        source = program.instructions[line.args[0]].dtype
        return source != torch.bool and source.is_floating_point != line.dtype.is_floating_point
    return line.op not in _CHEAP
