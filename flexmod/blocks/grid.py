"""The grid of a map: its extents, its blocks, and squares of blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmod.program import Program


class Grid(NamedTuple):
    """Extents of a map: planes (batch, head), elements, and block sizes."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @staticmethod
    def of(program: Program, shape: tuple[int, int, int, int], block_size: tuple[int, int]) -> Grid:
        """Planes only for the axes that the mask reads; the others share one."""
        batch = shape[0] if "b" in program.reads else min(shape[0], 1)
        heads = shape[1] if "h" in program.reads else min(shape[1], 1)
        return Grid(batch, heads, *shape[2:], *block_size)

    @property
    def rows(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def planes(self) -> int:
        return self.batch * self.heads

    @property
    def extents(self) -> dict[str, int]:
        """How many values each index of a mask takes."""
        return {"b": self.batch, "h": self.heads, "q_idx": self.q_len, "kv_idx": self.kv_len}

    @property
    def cuts(self) -> tuple[bool, bool]:
        """Whether the last row and the last column of blocks are cut short by an end."""
        return self.q_len % self.block_q != 0, self.kv_len % self.block_kv != 0

    @property
    def index_dtype(self) -> torch.dtype:
        """32 bits where positions, and keys of blocks, fit into them: twice as fast."""
        largest = max(self.q_len, self.kv_len) * 4, self.planes * self.rows * (self.columns + 1)
        return torch.int32 if max(largest) < 2**31 else torch.int64

    def side(self, level: int) -> tuple[int, int]:
        """Rows and columns of squares of 2**level blocks a side."""
        return -(-self.rows >> level), -(-self.columns >> level)


class Cells(NamedTuple):
    """Squares of 2**level blocks a side: tensors of one length and of `Grid.index_dtype`."""

    plane: Tensor
    row: Tensor
    column: Tensor

    def take(self, index: Tensor | slice) -> Cells:
        if isinstance(index, slice):
            return Cells(*(x[index] for x in self))
        return Cells(*(x.index_select(0, index) for x in self))

    def batch_and_head(self, grid: Grid) -> tuple[Tensor, Tensor]:
        if grid.batch == 1 or grid.heads == 1:
            zero = torch.zeros_like(self.plane)
            return (self.plane, zero) if grid.heads == 1 else (zero, self.plane)
        return self.plane // grid.heads, self.plane % grid.heads


def whole_grid(grid: Grid, level: int, device: torch.device) -> Cells:
    """All squares of a level."""
    rows, columns = grid.side(level)
    sizes = (grid.planes, rows, columns)
    axes = [torch.arange(n, device=device, dtype=grid.index_dtype) for n in sizes]
    return Cells(*(x.flatten() for x in torch.meshgrid(*axes, indexing="ij")))


def quarters(grid: Grid, cells: Cells, level: int) -> Cells:
    """The four parts of each square, at the finer `level`, that lie inside the grid."""
    steps = torch.arange(2, device=cells.row.device, dtype=cells.row.dtype)
    count = len(cells.row)
    row = (cells.row[:, None] * 2 + steps)[:, :, None].expand(count, 2, 2).flatten()
    column = (cells.column[:, None] * 2 + steps)[:, None, :].expand(count, 2, 2).flatten()
    split = Cells(cells.plane[:, None].expand(count, 4).flatten(), row, column)
    rows, columns = grid.side(level)
    if (rows, columns) == tuple(2 * n for n in grid.side(level + 1)):
        return split
    return split.take(((row < rows) & (column < columns)).nonzero().flatten())


def spans(grid: Grid, cells: Cells, level: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and last q_idx, first and last kv_idx of each square."""
    high, wide = grid.block_q << level, grid.block_kv << level
    q, kv = cells.row * high, cells.column * wide
    return (
        q,
        (q + (high - 1)).clamp(max=grid.q_len - 1),
        kv,
        (kv + (wide - 1)).clamp(max=grid.kv_len - 1),
    )


def cut_short(grid: Grid, cells: Cells, level: int) -> Tensor | None:
    """Where a square holds a block that is cut short by an end; None: nowhere."""
    rows, columns = grid.side(level)
    cut_row, cut_column = grid.cuts
    in_row = cells.row == rows - 1 if cut_row else None
    in_column = cells.column == columns - 1 if cut_column else None
    if in_row is None or in_column is None:
        return in_column if in_row is None else in_row
    return in_row | in_column
