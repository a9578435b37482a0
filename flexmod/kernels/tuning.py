"""Tiles: which sizes a kernel runs with, and proof that they fit.

To add a tuning row, put it before the more general ones of `ROWS`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flexmod.kernels.problem import Problem
from flexmod.program import dependence

SMALLEST = 16  # tensor cores take no smaller tile
HINTS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")  # kernel_options, as fields of Tiles
_LONG_MODS = 8  # instructions a pair, beyond which a mod wants more registers
_BARRIERS = 1024  # bytes of shared memory that a compiler may add


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


class Row(NamedTuple):
    """Tiles of a kernel for targets whose arch starts with `arch`, types up to `itemsize` bytes
    and padded head dimensions up to `dim`. `kernel` may be part of a kernel's name; those of mods
    that gather end in "_gather", those of long mods in "_long"."""

    kernel: str
    arch: str
    itemsize: int
    dim: int
    tiles: Tiles


ROWS = [
    Row("forward", "interpreter", 8, 1024, Tiles(64, 64, 4, 1)),
    Row("forward_gather", "sm_9", 2, 128, Tiles(128, 64, 8, 3)),
    Row("forward_gather", "sm_10", 2, 128, Tiles(64, 32, 8, 2)),
    Row("forward_gather", "", 2, 64, Tiles(64, 64, 4, 2)),
    Row("forward_gather", "", 2, 128, Tiles(64, 64, 8, 2)),
    Row("forward_long", "sm_9", 2, 64, Tiles(128, 64, 8, 3)),
    Row("forward", "sm_9", 2, 64, Tiles(128, 64, 4, 3)),
    Row("forward", "sm_9", 2, 128, Tiles(128, 64, 8, 3)),
    Row("forward", "sm_9", 2, 256, Tiles(64, 64, 8, 2)),
    Row("forward", "sm_10", 2, 64, Tiles(128, 64, 8, 3)),
    Row("forward", "sm_10", 2, 128, Tiles(64, 32, 8, 2)),
    Row("forward", "gfx", 2, 128, Tiles(128, 64, 4, 1)),
    Row("forward", "", 2, 64, Tiles(128, 64, 8, 3)),
    Row("forward", "", 2, 128, Tiles(128, 64, 8, 2)),
    Row("forward", "", 2, 256, Tiles(64, 32, 8, 2)),
    Row("forward", "", 2, 512, Tiles(32, 32, 8, 1)),
    Row("forward", "", 4, 64, Tiles(64, 32, 8, 1)),
    Row("forward", "", 4, 128, Tiles(32, 16, 8, 2)),
    Row("forward", "", 4, 512, Tiles(16, 32, 8, 1)),
    Row("forward", "", 8, 64, Tiles(32, 32, 4, 1)),
    Row("forward", "", 8, 256, Tiles(16, 16, 4, 1)),
    Row("backward", "interpreter", 8, 1024, Tiles(32, 32, 4, 1)),
    Row("backward", "sm_9", 2, 64, Tiles(64, 64, 4, 3)),
    Row("backward", "sm_9", 2, 128, Tiles(64, 64, 4, 2)),
    Row("backward", "", 2, 128, Tiles(64, 64, 8, 2)),
    Row("backward", "", 2, 256, Tiles(32, 32, 4, 1)),
    Row("backward", "", 2, 512, Tiles(16, 32, 4, 1)),
    Row("backward", "", 4, 128, Tiles(32, 32, 4, 1)),
    Row("backward", "", 8, 512, Tiles(16, 16, 4, 1)),
]


def padded(dim: int) -> int:
    """A head dimension as a tile holds it: a power of two, at least SMALLEST."""
    return max(SMALLEST, 1 << (dim - 1).bit_length())


def shared_bytes(kernel: str, tiles: Tiles, dims: tuple[int, int], itemsize: int) -> int:
    """Shared memory of a kernel: the tiles that stay, those of each stage, and barriers.

    Backward kernels also pass two score tiles through shared memory.
    """
    head, value = dims
    stay, stream = tiles.q * head, tiles.kv * (head + value)
    scores = 0
    if kernel.startswith("backward_query"):
        stay, scores = tiles.q * (head + value), 2 * tiles.q * tiles.kv
    elif kernel.startswith("backward_key"):
        stay, stream = stream, tiles.q * (head + value)
        scores = 2 * tiles.q * tiles.kv
    return (stay + tiles.stages * stream + scores) * itemsize + _BARRIERS


def gathers(problem: Problem) -> bool:
    """Whether score_mod reads a table element by element, which takes registers for addresses."""
    return problem.score is not None and dependence.gathers(problem.score)


def _effort(problem: Problem) -> int:
    programs = (problem.score, problem.mask_program)
    return max((dependence.effort(p) for p in programs if p is not None), default=0)


def plan(problem: Problem, target: Target, kernel: str) -> Tiles | None:
    """The tiles of a kernel for a problem; None if no tiles fit (see `refuses` of the engine)."""
    if gathers(problem):
        kernel += "_gather"
    elif _effort(problem) > _LONG_MODS:
        kernel += "_long"
    dims = (padded(problem.head_dim), padded(problem.value_dim))
    lengths = (padded(problem.q_len), padded(problem.kv_len))
    hints = tuple(problem.options.get(name) for name in HINTS)
    return _plan(kernel, target, dims, problem.dtype.itemsize, lengths, hints)


@lru_cache(maxsize=4096)
def _plan(
    kernel: str,
    target: Target,
    dims: tuple[int, int],
    itemsize: int,
    lengths: tuple[int, int],
    hints: tuple[int | None, ...],
) -> Tiles | None:
    fitting = [
        row.tiles
        for row in ROWS
        if row.kernel in kernel
        and target.arch.startswith(row.arch)
        and itemsize <= row.itemsize
        and max(dims) <= row.dim
    ]
    if not fitting:
        return None
    q, kv, warps, stages = (hint or own for hint, own in zip(hints, fitting[0], strict=True))
    # Short sequences need no large tiles.
    tiles = Tiles(min(q, lengths[0]), min(kv, lengths[1]), warps, stages)
    while shared_bytes(kernel, tiles, dims, itemsize) > target.shared:
        smaller = _smaller(tiles)
        if smaller is None:
            return None
        tiles = smaller
    return tiles


def _smaller(tiles: Tiles) -> Tiles | None:
    if tiles.stages > 1:
        return Tiles(tiles.q, tiles.kv, tiles.warps, tiles.stages - 1)
    if tiles.kv > SMALLEST:
        return Tiles(tiles.q, tiles.kv // 2, tiles.warps, 1)
    return Tiles(tiles.q // 2, tiles.kv, tiles.warps, 1) if tiles.q > SMALLEST else None


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
