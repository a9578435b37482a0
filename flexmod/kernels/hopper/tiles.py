"""How the hopper kernels are cut: warpgroups, registers, stages."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.kernels import tuning
from flexmod.kernels.problem import Problem
from flexmod.program.sample import visible_share

TILE_KV = 128  # of the backward
ROWS = 64  # of queries a consumer of the forward
WHOLE = 128  # numbers of a head at most, if it is not cut in pieces


class Forward(NamedTuple):
    """consumers: warpgroups of 64 queries. registers: of a thread in them; `most`: of one when the
    kernel starts, which decides how many there are to share. stages: tiles of keys in flight, of
    `keys` each. sides: tiles of queries in flight."""

    consumers: int
    keys: int
    stages: int
    sides: int
    registers: int
    most: int


_WIDEST = Forward(2, 64, 2, 1, 240, 168)
_WIDER = Forward(2, 64, 3, 1, 240, 168)
_WIDE = Forward(2, 128, 2, 2, 240, 168)
_NARROW = Forward(2, 128, 3, 2, 240, 168)
# 192 queries: more products than exponentials at a time, but no room for a score mod.
_NARROW_PLAIN = Forward(3, 128, 3, 2, 160, 128)
_LONG = 4096  # queries, and keys that one sees, from which it is faster with a mask too


class Backward(NamedTuple):
    """queries: of a stage. stages: in flight. holds_keys, holds_values: in registers while a tile
    of them is served. Products would else read them from shared memory each time."""

    queries: int
    stages: int
    holds_keys: bool
    holds_values: bool


_WIDE_BACKWARD = Backward(64, 2, False, False)  # accumulators leave no registers
_NARROW_BACKWARD = Backward(128, 3, False, True)
_NARROW_PLAIN_BACKWARD = Backward(128, 3, True, True)


def backward(problem: Problem) -> Backward:
    """The one measured best on an H200."""
    if max(padded(problem)) > 64:
        return _WIDE_BACKWARD
    return _NARROW_PLAIN_BACKWARD if problem.score is None else _NARROW_BACKWARD


def forward(problem: Problem) -> Forward:
    """The one measured best on an H200."""
    widest = max(problem.head_dim, problem.value_dim)
    if widest > WHOLE:
        return _WIDEST if widest > 192 else _WIDER
    if widest > 64:
        return _WIDE
    return _NARROW_PLAIN if problem.score is None and _has_long_rows(problem) else _NARROW


def _has_long_rows(problem: Problem) -> bool:
    """Whether queries see so many keys that what a tile of them costs beside matters little."""
    mask = problem.mask_program
    if mask is None:
        return True
    share = visible_share(mask, *problem.extents.values()) or 0.0
    return min(problem.q_len, share * problem.kv_len) >= _LONG


def describe(problem: Problem) -> str:
    """For people."""
    cut = forward(problem)
    return (
        f"{ROWS * cut.consumers} queries x {cut.keys} keys, {cut.consumers} warpgroups and a "
        f"producer, {cut.stages} stages"
    )


def padded(problem: Problem) -> tuple[int, int]:
    """Widths of a key and a value in shared memory, or of their pieces if heads are wide."""
    dims = problem.head_dim, problem.value_dim
    if max(dims) > WHOLE:
        width = 64 if any(WHOLE < d <= 192 for d in dims) else 128
        return width, width
    head, value = (tuning.padded(max(d, 32)) for d in dims)
    return head, value


def fields(problem: Problem) -> dict[str, Any]:
    """Compile-time arguments that both kernels share."""
    block = problem.mask.block_size if problem.mask else (1, 1)
    head, value = padded(problem)
    return {
        "HEAD_DIM": problem.head_dim,
        "VALUE_DIM": problem.value_dim,
        "PADDED_DIM": head,
        "PADDED_VALUE": value,
        "TILE_KV": TILE_KV,
        "BLOCK_Q": block[0],
        "BLOCK_KV": block[1],
        "HAS_SCORE": problem.score is not None,
        "HAS_MAP": problem.mask is not None,
    }


def is_even(problem: Problem, keys: int = TILE_KV) -> bool:
    """Whether no tile sticks out of a sequence. To ask it makes another kernel."""
    return not (problem.q_len % (2 * ROWS) or problem.kv_len % keys)


@cache
def multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


def can_be_copied(x: Tensor) -> bool:
    """Whether the bulk copy engine can read it: rows of 16 bytes, none of them repeated."""
    strides = x.stride()
    aligned = x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in strides[:3])
    return (
        aligned
        and strides[3] == 1
        and all(s or n == 1 for s, n in zip(strides, x.shape, strict=True))
    )
