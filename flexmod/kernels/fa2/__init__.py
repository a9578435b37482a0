"""The `fa2` engine: plain Triton, for CUDA sm_80 and newer and for ROCm.

On CPU tensors it runs in Triton's interpreter (set TRITON_INTERPRET=1 before Triton is imported):
that is how its kernels are tested without a GPU. The kernels are `templates/fa2_*.py.jinja`.
"""

from __future__ import annotations

from flexmod.kernels import tuning
from flexmod.kernels.fa2.backward import backward, prepare_backward
from flexmod.kernels.fa2.forward import forward, prepare
from flexmod.kernels.fa2.target import target
from flexmod.kernels.problem import Problem

__all__ = ["backward", "forward", "prepare", "prepare_backward", "refuses"]


def refuses(problem: Problem) -> str | None:
    """Why this engine cannot serve a problem, or None."""
    found = target(problem.device)
    if isinstance(found, str):
        return found
    if tuning.plan(problem, found, "forward") is None:
        return tuning.limit(problem, found)
    return None
