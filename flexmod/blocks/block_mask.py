"""`BlockMask`: a mask, its extent, and which blocks of it are empty, partial or full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexmod.blocks import lists
from flexmod.blocks.classify import Grid, classify
from flexmod.blocks.draw import draw_tiles
from flexmod.blocks.runs import EMPTY, FULL, PARTIAL, Runs
from flexmod.errors import BlockMaskError
from flexmod.program import Program
from flexmod.program.evaluate import evaluate, raise_if_invalid
from flexmod.program.specialize import specialize

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of a (B, H, Q_LEN, KV_LEN) mask need work. Made by `create_block_mask`.

    A block is empty (skipped), partial (the mask is evaluated) or full (the mask is not
    evaluated). The map knows its mask: `dense()` shows it token by token.

    Attributes:
        shape: (B, H, Q_LEN, KV_LEN) as asked for; B and H may be 1 and broadcast.
        block_size: (query, key) tokens of a block.
        program: the traced mask.
        runs: the live blocks. Planes are kept only for the axes that the mask reads.
    """

    shape: tuple[int, int, int, int]
    block_size: tuple[int, int]
    program: Program
    runs: Runs
    versions: tuple[int, ...] = ()
    _regridded: dict[tuple[int, int], BlockMask] = field(default_factory=dict, repr=False)

    @staticmethod
    def from_program(
        program: Program,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int],
        device: torch.device,
    ) -> BlockMask:
        grid = _grid(program, shape, block_size)
        runs = classify(program, grid, device)
        return BlockMask(shape, block_size, program, runs, _versions(program))

    from_kv_blocks = staticmethod(lists.from_kv_blocks)

    @property
    def grid(self) -> Grid:
        return _grid(self.program, self.shape, self.block_size)

    @cached_property
    def transposed(self) -> Runs:
        """Runs of query blocks for each block of keys: the order of a backward pass."""
        return self.runs.transposed(self.grid.planes, self.grid.columns)

    @property
    def device(self) -> torch.device:
        return self.runs.indptr.device

    @property
    def mask_mod(self) -> Program:
        return self.program

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self.shape[2:]

    BLOCK_SIZE = property(lambda self: self.block_size)

    def tiles(self) -> Tensor:
        """Kinds of all blocks, int8 [B, H, query blocks, key blocks]: 0 empty, 1 partial, 2 full."""
        grid = self.grid
        kinds = self.runs.tiles(grid.columns).view(grid.batch, grid.heads, grid.rows, grid.columns)
        return kinds.expand(*self.shape[:2], -1, -1)

    def to_dense(self) -> Tensor:
        """1 where a block needs work, int32 [B, H, query blocks, key blocks]: torch's view."""
        return (self.tiles() != EMPTY).int()

    def dense(self) -> Tensor:
        """The mask token by token, bool [B, H, Q_LEN, KV_LEN]."""
        rows = [self.visible_rows(q) for q in self._row_chunks()]
        return torch.cat(rows, 2) if rows else torch.zeros(self.shape, dtype=torch.bool)

    def visible_rows(self, q_idx: Tensor) -> Tensor:
        """The mask of some query rows, bool [B, H, len(q_idx), KV_LEN]."""
        batch, heads, q_len, kv_len = self.shape
        extents = {"b": batch, "h": heads, "q_idx": q_len, "kv_idx": kv_len}
        program = specialize(self.program, extents)
        count = lambda n: torch.arange(n, device=self.device)  # noqa: E731
        inputs = {
            "b": count(batch)[:, None, None, None],
            "h": count(heads)[:, None, None],
            "q_idx": q_idx[:, None],
            "kv_idx": count(kv_len),
        }
        (visible,), invalid = evaluate(program, inputs)
        raise_if_invalid(program, invalid, None)
        return visible.expand(batch, heads, len(q_idx), kv_len)

    def _row_chunks(self) -> Iterator[Tensor]:
        yield from torch.arange(self.shape[2], device=self.device).split(_ROWS_AT_ONCE)

    def counts(self) -> tuple[int, int, int]:
        """How many blocks are (empty, partial, full), over all of B and H."""
        grid = self.grid
        copies = self.shape[0] * self.shape[1] // max(grid.planes, 1)
        partial, full = self.runs.counts()
        total = grid.planes * grid.rows * grid.columns
        return (total - partial - full) * copies, partial * copies, full * copies

    def sparsity(self) -> float:
        """Percent of blocks that are empty, in [0, 100]."""
        counts = self.counts()
        return 100.0 * counts[0] / max(sum(counts), 1)

    def density(self) -> float:
        """Percent of elements that are visible, in [0, 100]."""
        seen = sum(int(self.visible_rows(q).sum()) for q in self._row_chunks())
        return 100.0 * seen / max(self.numel(), 1)

    def numel(self) -> int:
        batch, heads, q_len, kv_len = self.shape
        return batch * heads * q_len * kv_len

    def regrid(self, block_size: tuple[int, int]) -> BlockMask:
        """The same mask in blocks of another size; remembered."""
        if block_size == self.block_size:
            return self
        if block_size not in self._regridded:
            self._regridded[block_size] = BlockMask.from_program(
                self.program, self.shape, block_size, self.device
            )
        return self._regridded[block_size]

    def to(self, device: torch.device | str) -> BlockMask:
        """The map and the tensors that its mask captures, on another device."""
        captures = tuple(c.to(device) for c in self.program.captures)
        program = replace(self.program, captures=captures)
        runs = self.runs.to(device)
        return BlockMask(self.shape, self.block_size, program, runs, _versions(program))

    def check_unchanged(self) -> None:
        """Raise if a captured tensor was changed in place since the map was made."""
        if _versions(self.program) != self.versions:
            raise BlockMaskError(
                f"a tensor captured by {self.program.name} was changed in place after its block "
                "mask was made: make the block mask again"
            )

    def __getattr__(self, name: str) -> Any:
        if name in lists.VIEWS:
            return lists.view(self.tiles(), name)
        raise AttributeError(f"BlockMask has no attribute {name!r}")

    def as_tuple(self) -> tuple[Any, ...]:
        """(Q_LEN, KV_LEN, the eight index lists, BLOCK_SIZE, mask_mod), as torch orders them."""
        views = [getattr(self, name) for name in lists.VIEWS]
        return (*self.seq_lengths, *views, self.block_size, self.mask_mod)

    def to_string(self, grid_size: int | tuple[int, int] = 20, limit: int = 4) -> str:
        """Pictures of the first `limit` planes, at most grid_size rows and columns each."""
        size = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        tiles = self.tiles().flatten(0, 1)
        planes = [draw_tiles(plane, *size) for plane in tiles[:limit]]
        more = [f"... {len(tiles) - limit} more"] if len(tiles) > limit else []
        return "\n\n".join(planes + more)

    def __str__(self) -> str:
        empty, partial, full = self.counts()
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, {empty} empty, "
            f"{partial} partial, {full} full, sparsity={self.sparsity():.2f}%)\n{self.to_string()}"
        )

    __repr__ = __str__


def _grid(program: Program, shape: tuple[int, int, int, int], block_size: tuple[int, int]) -> Grid:
    """Planes only for the axes that the mask reads."""
    batch = shape[0] if "b" in program.reads else min(shape[0], 1)
    heads = shape[1] if "h" in program.reads else min(shape[1], 1)
    return Grid(batch, heads, *shape[2:], *block_size)


def _versions(program: Program) -> tuple[int, ...]:
    return tuple(c._version if not c.is_inference() else 0 for c in program.captures)
