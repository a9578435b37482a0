"""The `hopper` engine: Gluon kernels for NVIDIA sm_90 in half precision.

They are `templates/hopper_*.jinja`, and follow FlashAttention-3 (Shah et al., 2024): warps that
copy, warpgroups that compute, and tensor cores that work while registers hold the softmax. What
they cannot serve, `fa2` can.
"""

from __future__ import annotations

from functools import cache

import torch

from flexmod.kernels import tuning
from flexmod.kernels.fa2.target import target
from flexmod.kernels.hopper.backward import backward, prepare_backward
from flexmod.kernels.hopper.forward import forward, prepare
from flexmod.kernels.hopper.tiles import WHOLE
from flexmod.kernels.problem import Problem

__all__ = ["backward", "forward", "prepare", "prepare_backward", "refuses"]

_DIMS = (32, 256)
_BLOCK = 128  # what blocks of a map must be multiples of
_FEWEST_ROWS = 64  # a tile has twice as many
_LONGEST_MOD = 20  # instructions a pair, beyond which registers would spill in the inner loop
_LONGEST = 1 << 29  # a position travels with two more bits in an int32


def refuses(problem: Problem) -> str | None:
    """Why this engine cannot serve a problem, or None."""
    found = target(problem.device)
    if isinstance(found, str):
        return found
    if found.arch != "sm_90":
        return f"it is for sm_90, this is {found.arch}"
    return _gluon() or limits(problem)


@cache
def _gluon() -> str | None:
    try:
        import flexmod.kernels.hopper.shim  # noqa: F401  (only whether it can be)
    except (ImportError, AttributeError):
        return "this Triton's Gluon is not one it knows"
    return None


def limits(problem: Problem) -> str | None:
    """What about a problem it cannot serve on any device."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not {problem.dtype}"
    for dim in (problem.head_dim, problem.value_dim):
        if not _DIMS[0] <= dim <= _DIMS[1] or dim % 8:
            return f"it serves head dimensions of {_DIMS[0]} to {_DIMS[1]} by 8, not {dim}"
    if problem.value_dim > max(problem.head_dim, WHOLE):  # they leave through the room of queries
        return f"values wider than keys may have {WHOLE} numbers at most, not {problem.value_dim}"
    if problem.q_len < _FEWEST_ROWS:
        return f"it serves {_FEWEST_ROWS} queries and more, not {problem.q_len}"
    longest = max(problem.q_len, problem.kv_len)
    if longest >= _LONGEST:
        return f"it serves fewer than {_LONGEST:,} queries and keys, not {longest:,}"
    if problem.dropout_p:
        return "it has no dropout"
    if problem.score is None and problem.scales_first:
        return "without a score_mod it needs a scale above 0"
    if tuning.effort(problem) > _LONGEST_MOD:
        return "a mod is too long for the registers of a warpgroup"
    if problem.mask is not None and any(size % _BLOCK for size in problem.mask.block_size):
        return f"blocks of the map must be multiples of {_BLOCK}, not {problem.mask.block_size}"
    return None
