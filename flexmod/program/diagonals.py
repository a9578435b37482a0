"""What a mod knows of kv_idx - q_idx alone, computed once a diagonal of 8 x 8 pairs.

In the tile of scores that the tensor cores of Hopper leave, a thread holds two rows, 8 apart, and
pairs of columns, 8 apart: so what depends on the difference alone, such as an entry of a table of
relative biases, is the same number for its second row as for its first, 8 columns earlier. It is
computed on the 8 x 8 blocks of the first rows and one more, and each is put in both places: half
the loads, and at addresses that differ by constants.
"""

from __future__ import annotations

from flexmod.program.dependence import ALONG, dependence
from flexmod.program.ir import Instruction, Load, Program, rebuilt
from flexmod.program.parts import is_dear


def split(program: Program) -> tuple[Program | None, Program]:
    """A program of what is computed along diagonals, if anything is, and one of the rest.

    The first is a function of b, h, q_idx and kv_idx: any two of the latter with the difference.
    Its results are the ALONG of the second.
    """
    found = dependence(program)
    worth: list[bool] = []
    unsure: list[bool] = []  # reads an entry that may not be there: the flag belongs to the tile
    for line, what in zip(program.instructions, found, strict=True):
        unsure.append(
            any(unsure[a] for a in line.args)
            or (isinstance(line.attr, Load) and "check" in line.attr.modes)
        )
        alone = what.by_difference and what.inputs <= {"q_idx", "kv_idx", "b", "h"}
        dear = is_dear(program, line) or any(worth[a] for a in line.args)
        worth.append(what.reads_both and alone and dear and not unsure[-1])
    used = {a for n, line in enumerate(program.instructions) if not worth[n] for a in line.args}
    border = [n for n in sorted(used | set(program.outputs)) if worth[n]]
    if not border:
        return None, program
    lines = list(program.instructions)
    inner = rebuilt(program, lines, border)[0]
    for number, n in enumerate(border):
        lines[n] = Instruction(ALONG, (), lines[n].dtype, number)
    return inner, rebuilt(program, lines, program.outputs)[0]
