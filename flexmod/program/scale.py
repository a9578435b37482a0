"""A mod of products of queries and keys whose scale is still to come: score = product * scale.

A score that is only multiplied, by what is one number a head, leaves the scale to that number: then
a pair costs one multiplication less (softcap, learned temperatures).
"""

from __future__ import annotations

from dataclasses import replace

from flexmod.program.dependence import dependence
from flexmod.program.ir import Instruction, Program

SCALE = "scale"  # an input that only kernels of their own know


def of_products(program: Program) -> Program:
    """The same mod, whose input `score` is a product, and which reads `scale`."""
    if "score" not in program.reads:
        return program
    lines = program.instructions
    score = next(n for n, line in enumerate(lines) if line.op == "input" and line.attr == "score")
    dtype, factor = lines[score].dtype, _factor(program, score)
    made = [Instruction("input", (), dtype, SCALE)]
    place: list[int] = []
    for n, line in enumerate(lines):
        args = tuple(place[a] for a in line.args)
        if factor and n == factor[0]:
            made.append(line._replace(args=(0, place[factor[1]])))
            made.append(Instruction("mul", (place[score], len(made) - 1), dtype))
        else:
            made.append(line._replace(args=args))
        if n == score and not factor:
            made.append(Instruction("mul", (len(made) - 1, 0), dtype))
        place.append(len(made) - 1)
    outputs = tuple(place[n] for n in program.outputs)
    return replace(program, instructions=tuple(made), outputs=outputs, sites={})


def _factor(program: Program, score: int) -> tuple[int, int] | None:
    """The only line that reads the score, and the number a head that it multiplies it by."""
    lines = program.instructions
    readers = [n for n, line in enumerate(lines) if score in line.args]
    if len(readers) != 1 or score in program.outputs:
        return None
    line = lines[readers[0]]
    others = [a for a in line.args if a != score]
    is_product = line.op == "mul" or (line.op == "truediv" and line.args[0] == score)
    if not is_product or len(others) != 1:
        return None
    is_of_head = dependence(program)[others[0]].inputs <= {"b", "h"}
    return (readers[0], others[0]) if is_of_head else None
