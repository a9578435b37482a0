"""Which blocks need work, stored as runs of neighbouring blocks in each row of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2


class Pieces(NamedTuple):
    """Rectangles one row high: int64 tensors of one length, in any order, not overlapping."""

    row: Tensor
    start: Tensor  # first block column
    stop: Tensor  # one past the last
    kind: Tensor  # PARTIAL or FULL


@dataclass(frozen=True, eq=False)
class Runs:
    """Live blocks of every row, compressed: row r owns entries indptr[r] : indptr[r + 1].

    Rows are (plane, query block) flattened, where a plane is one (batch, head) of the map. In a
    row, runs ascend and never touch a neighbour of the same kind.
    """

    indptr: Tensor  # int32 [rows + 1]
    table: Tensor  # int32 [runs, 3]: start, stop (block columns), kind

    @staticmethod
    def from_pieces(pieces: Pieces, rows: int, columns: int) -> Runs:
        """Sort by row and column, and join neighbours of one kind."""
        order = torch.argsort(pieces.row * (columns + 1) + pieces.start)
        row, start, stop, kind = (x[order] for x in pieces)
        fresh = torch.ones_like(row, dtype=torch.bool)
        fresh[1:] = (row[1:] != row[:-1]) | (start[1:] != stop[:-1]) | (kind[1:] != kind[:-1])
        first = fresh.nonzero().flatten()
        last = torch.cat([first[1:], first.new_tensor([len(row)])])[: len(first)] - 1
        counts = torch.bincount(row[first], minlength=rows)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        table = torch.stack([start[first], stop[last], kind[first]], 1).int()
        return Runs(indptr, table.contiguous())

    @staticmethod
    def from_tiles(tiles: Tensor) -> Runs:
        """From a table of kinds [rows, columns]."""
        row, column = tiles.nonzero(as_tuple=True)
        pieces = Pieces(row, column, column + 1, tiles[row, column].long())
        return Runs.from_pieces(pieces, *tiles.shape)

    @property
    def rows(self) -> int:
        return len(self.indptr) - 1

    @cached_property
    def host(self) -> list[list[tuple[int, int, bool]]]:
        """Per row (start, stop, is_full), on the host: what the CPU engine walks."""
        indptr, table = self.indptr.tolist(), self.table.tolist()
        spans = zip(indptr, indptr[1:], strict=False)
        return [[(a, b, k == FULL) for a, b, k in table[i:j]] for i, j in spans]

    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, column, kind) of every live block, int64, by row."""
        lengths = (self.table[:, 1] - self.table[:, 0]).long()
        runs_a_row = (self.indptr[1:] - self.indptr[:-1]).long()
        row = torch.arange(self.rows, device=lengths.device).repeat_interleave(runs_a_row)
        within = torch.arange(int(lengths.sum()), device=lengths.device)
        within = within - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        column = self.table[:, 0].long().repeat_interleave(lengths) + within
        kind = self.table[:, 2].long().repeat_interleave(lengths)
        return row.repeat_interleave(lengths), column, kind

    def tiles(self, columns: int) -> Tensor:
        """The table of kinds, int8 [rows, columns]."""
        row, column, kind = self.blocks()
        tiles = torch.zeros(self.rows, columns, dtype=torch.int8, device=row.device)
        tiles[row, column] = kind.to(torch.int8)
        return tiles

    def transposed(self, planes: int, columns: int) -> Runs:
        """The runs of query blocks in each column of key blocks."""
        row, column, kind = self.blocks()
        rows = self.rows // max(planes, 1)
        plane, row = row // max(rows, 1), row % max(rows, 1)
        pieces = Pieces(plane * columns + column, row, row + 1, kind)
        return Runs.from_pieces(pieces, planes * columns, rows)

    def counts(self) -> tuple[int, int]:
        """How many blocks are partial and how many are full."""
        lengths = (self.table[:, 1] - self.table[:, 0]).long()
        full = int((lengths * (self.table[:, 2] == FULL)).sum())
        return int(lengths.sum()) - full, full

    def to(self, device: torch.device | str) -> Runs:
        return Runs(self.indptr.to(device), self.table.to(device))
