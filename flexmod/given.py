"""What a call was given, in the form that everything behind it works with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from flexmod import checks
from flexmod.blocks import BlockMask, foreign
from flexmod.blocks.memory import map_of
from flexmod.blocks.pending import PendingBlockMask
from flexmod.program import Program, trace
from flexmod.program.transforms import as_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

Mod = Callable[..., Any] | Program
Map: TypeAlias = "BlockMask | TorchBlockMask | Mod"
_MAP_BLOCK = 128


def score(mod: Mod | None, query: Tensor) -> Program | None:
    if mod is None or (isinstance(mod, Program) and mod.kind == "score"):
        return mod
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    return trace(mod, "score", score_dtype=work, device=query.device)


def scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return 1 / math.sqrt(max(query.shape[-1], 1))
    return scale if isinstance(scale, torch.SymFloat) else float(scale)


def seed(p: float, seed: int | None) -> int:
    """64 bits; drawn only where they are used."""
    if seed is None:
        return int(torch.randint(2**63 - 1, ()).item()) if p else 0
    return checks.seed(seed) & (2**64 - 1)


def seed_tensor(p: float, seed: int | None) -> Tensor | None:
    """The same as a 0-dim tensor, drawn anew on each run of a graph."""
    if not p:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    if isinstance(seed, torch.SymInt):
        return as_tensor(seed, torch.int64)
    low = checks.seed(seed) & (2**64 - 1)
    return torch.full((), low - (low >> 63 << 64), dtype=torch.int64, device="cpu")


def deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else bool(asked)


def block_mask(given: Any, query: Tensor, kv_len: int) -> BlockMask | None:
    """The map of a call; a mask_mod, and torch's map, become one."""
    if given is None:
        return None
    if foreign.is_torch_map(given):
        given = foreign.from_torch(given)
    if isinstance(given, BlockMask):
        return given.near(query.device)
    program = trace(given, "mask", device=query.device)
    checks.mask_captures(program, query.device)
    shape = (*query.shape[:3], kv_len)
    return map_of(program, shape, (_MAP_BLOCK, _MAP_BLOCK), query.device)


def undecided(
    given: Any, query: Tensor, kv_len: int
) -> tuple[BlockMask | Program | None, tuple[int, int]]:
    """The mask of a call whose tensors have no values yet, and the blocks to decide it in."""
    lengths = (query.shape[2], kv_len)
    block_size, extents = (_MAP_BLOCK, _MAP_BLOCK), (*query.shape[:2], *lengths)
    if isinstance(given, PendingBlockMask):
        extents, block_size = given.wanted.extents, given.wanted.block_size
        given = given.wanted.mask_mod
    if foreign.is_torch_map(given):
        extents, block_size = foreign.extents(given), tuple(given.BLOCK_SIZE)
        given = foreign.listed(given)
    if isinstance(given, BlockMask):
        given = given.near(query.device)
        checks.block_mask(given, (*query.shape[:2], *lengths), query.device)
        return given, given.block_size
    if given is None:
        return None, block_size
    program = trace(given, "mask", device=query.device)
    checks.extents(program, extents, (*query.shape[:2], *lengths))
    checks.mask_captures(program, query.device)
    return program, block_size
