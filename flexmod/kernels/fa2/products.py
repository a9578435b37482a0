"""Sums over a plane that cost nothing a pair: of what the modified scores receive times the scores.

A learned scale a head receives the sum of grad * score over its plane, where grad is what modified
scores receive. A score is scale * query . key: so the sum over a row is scale * query . d, where d,
the sum of grad * key, is made anyway for the gradient of the query. This holds where the derivative
of score_mod is one number a plane: d is multiplied by it at the end.
"""

from __future__ import annotations

from dataclasses import replace

from flexmod.kernels.fa2 import sums_text
from flexmod.kernels.fa2.sums import Plan
from flexmod.program import Program
from flexmod.program.dependence import dependence
from flexmod.program.emit import Function, emit
from flexmod.program.gradient import Gradient
from flexmod.program.ir import rebuilt

_PLANE = {"b", "h", "grad"}  # grad is 1 here


def found(plan: Plan, gradient: Gradient | None) -> Plan:
    """The plan, with kind "product" where a sum over a plane is of this sort."""
    if gradient is None or gradient.score is None:
        return plan
    degrees = _degrees(gradient.program)
    outputs = gradient.program.outputs
    if degrees[outputs[gradient.score]] != 0:
        return plan
    pairs = zip(plan.loads, plan.kinds, strict=True)
    is_product = [k == "plane" and degrees[outputs[load.value]] == 1 for load, k in pairs]
    kinds = ("product" if its else kind for its, kind in zip(is_product, plan.kinds, strict=True))
    return replace(plan, kinds=tuple(kinds))


def _degrees(program: Program) -> list[int | None]:
    """Of each line: 0 where it is one number a plane, 1 where it is that times the score."""
    degrees: list[int | None] = []
    for line, what in zip(program.instructions, dependence(program), strict=True):
        of = [degrees[a] for a in line.args]
        degree: int | None = None
        match line.op, of:
            case _ if what.inputs <= _PLANE:
                degree = 0
            case "input", _ if line.attr == "score":
                degree = 1
            case ("mul", [0, 1] | [1, 0]) | ("truediv", [1, 0]) | ("add" | "sub", [1, 1]):
                degree = 1
            case (("neg" | "cast"), [1]) if line.dtype.is_floating_point:
                degree = 1
        degrees.append(degree)
    return degrees


def function(plan: Plan, gradient: Program | None, fast: bool, names: str) -> Function:
    """Text of plane_mod: it stores the sums of rows, and returns the derivative of the plane.

    `names` are the parameters of the derivative's own function.
    """
    numbers = [n for n, kind in enumerate(plan.kinds) if kind == "product"]
    parameters = "".join(f", {name}" for name in (names, *sums_text.parameters(plan)) if name)
    head = f"plane_mod(score, b, h, plane, rows, q_len{parameters})"
    if gradient is None or not numbers:
        return Function(f"@triton.jit\ndef {head}:\n    return 1.0\n")
    outputs = [gradient.outputs[n] for n in (0, *(plan.loads[n].value for n in numbers))]
    own = emit(rebuilt(gradient, gradient.instructions, outputs)[0], "gradient_", fast)
    lines = [f"results = plane_results(1.0, score, b, h, 0, 0, {own.names})"]
    lines += [
        f"tl.store(sum{n} + plane.to(tl.int64) * q_len + rows, results[{at}], mask=rows < q_len)"
        for at, n in enumerate(numbers, 1)
    ]
    body = "\n    ".join([*lines, "return results[0]"])
    text = own.text.replace("def gradient_mod(", "def plane_results(")
    return Function(f"{text}\n\n@triton.jit\ndef {head}:\n    {body}\n")
