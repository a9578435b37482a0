"""Tiles: which sizes a kernel runs with, and proof that they fit.

What is best where is data, in `tuned`; this makes it fit a device, a problem and its blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flexmod.kernels import tuned
from flexmod.kernels.memory import Work, shared_bytes
from flexmod.kernels.problem import Problem
from flexmod.program import dependence

SMALLEST = 16  # tensor cores take no smaller tile
HINTS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")  # kernel_options, as fields of Tiles
_LONG_MODS = 8  # instructions a pair, beyond which a mod wants more registers
_refused: dict[Work, list[Tiles]] = {}


class Tiles(NamedTuple):
    """Sizes for one kernel: query rows and keys of a tile, warps, pipeline stages."""

    q: int
    kv: int
    warps: int
    stages: int


class Target(NamedTuple):
    """What decides tiles beside the problem. `shared` is bytes of shared memory a block may use."""

    arch: str  # "sm_90", "gfx942", "interpreter"
    shared: int

    @property
    def copies_tiles(self) -> bool:
        """Whether it has an engine that copies whole tiles (TMA); the interpreter imitates it."""
        return self.arch.startswith(("sm_9", "sm_10", "interpreter"))


def padded(dim: int) -> int:
    """A head dimension as a tile holds it: a power of two, at least SMALLEST."""
    return max(SMALLEST, 1 << (dim - 1).bit_length())


def gathers(problem: Problem) -> bool:
    """Whether score_mod reads a table element by element, which takes registers for addresses."""
    return problem.score is not None and dependence.gathers(problem.score)


def effort(problem: Problem) -> int:
    programs = (problem.score, problem.mask_program)
    return max((dependence.effort(p) for p in programs if p is not None), default=0)


def plan(problem: Problem, target: Target, kernel: str) -> Tiles | None:
    """The tiles of a kernel for a problem; None if no tiles fit (see `limit` for why)."""
    lengths = (padded(problem.q_len), padded(problem.kv_len))
    work = work_of(problem, target, kernel)
    return _plan(work, mods_class(problem), target.shared, lengths, _hints(problem, kernel))


def work_of(problem: Problem, target: Target, kernel: str) -> Work:
    """What the memory that a kernel takes depends on, beside its tiles."""
    programs = [p for p in (problem.score, problem.mask_program) if p is not None]
    return Work(
        kernel,
        target.arch,
        (padded(problem.head_dim), padded(problem.value_dim)),
        problem.dtype.itemsize,
        gathers(problem),
        sum(len(p.captures) for p in programs),
    )


def limit(problem: Problem, target: Target) -> str:
    """Why no tiles fit, in words."""
    widest = max(problem.head_dim, problem.value_dim)
    largest = tuned.largest_dim(target.arch, problem.dtype.itemsize)
    if widest > largest:
        return f"head_dim {widest} is above {largest}, the largest that it has tiles for"
    return (
        f"no tile of head_dim {problem.head_dim} and {problem.value_dim} in {problem.dtype} fits "
        f"into the {target.shared >> 10} KiB of shared memory of {target.arch}"
    )


def mods_class(problem: Problem) -> str:
    """What tuning rows tell apart: mods that "gather", "long" ones, and the others, ""."""
    if gathers(problem):
        return "gather"
    return "long" if effort(problem) > _LONG_MODS else ""


def _hints(problem: Problem, kernel: str) -> tuple[int | None, ...]:
    """kernel_options for a kernel: with a prefix for the forward or the backward alone, or both."""
    prefix, given = ("bwd_" if kernel.startswith("backward") else "fwd_"), problem.options
    return tuple(given.get(prefix + name, given.get(name)) for name in HINTS)


@lru_cache(maxsize=4096)
def _plan(
    work: Work,
    mods: str,
    shared: int,
    lengths: tuple[int, int],
    hints: tuple[int | None, ...],
) -> Tiles | None:
    row = tuned.find(work.kernel, mods, work.arch, work.itemsize, max(work.dims))
    if row is None:
        return None
    q, kv, warps, stages = (hint or own for hint, own in zip(hints, row.tiles, strict=True))
    # Short sequences need no large tiles.
    tiles: Tiles | None = Tiles(min(q, lengths[0]), min(kv, lengths[1]), warps, stages)
    while tiles is not None and not _fits(work, tiles, shared):
        tiles = smaller(tiles)
    return tiles


def _fits(work: Work, tiles: Tiles, shared: int) -> bool:
    if shared_bytes(work, tiles.q, tiles.kv, tiles.stages) > shared:
        return False
    return not any(
        refused.q <= tiles.q and refused.kv <= tiles.kv and refused.stages <= tiles.stages
        for refused in _refused.get(work, ())
    )


def refuse(work: Work, tiles: Tiles) -> None:
    """A device had no room for these tiles after all: from now on smaller ones are planned."""
    _refused.setdefault(work, []).append(tiles)
    _plan.cache_clear()


def smaller(tiles: Tiles) -> Tiles | None:
    """The next tiles to try: fewer stages, then fewer keys, then fewer queries."""
    if tiles.stages > 1:
        return tiles._replace(stages=tiles.stages - 1)
    if tiles.kv > SMALLEST:
        return tiles._replace(kv=tiles.kv // 2)
    return tiles._replace(q=tiles.q // 2) if tiles.q > SMALLEST else None


def fit_blocks(tiles: Tiles, block_size: tuple[int, int]) -> Tiles | None:
    """The tiles cut down to divide the blocks of a map; None if the blocks are too odd for that."""
    q = min(tiles.q, block_size[0] & -block_size[0])
    kv = min(tiles.kv, block_size[1] & -block_size[1])
    if min(q, kv) < SMALLEST:
        return None
    return Tiles(q, kv, tiles.warps, tiles.stages)


def precision(arch: str, dtype: torch.dtype) -> str:
    """How a product of float32 tiles is computed: as float32, never as tf32.

    "tf32x3" uses three tensor-core products (relative error about 1e-6) where true float32
    products would spill registers.
    """
    return "tf32x3" if dtype == torch.float32 and arch.startswith("sm_") else "ieee"
