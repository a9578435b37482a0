"""Which blocks need work, stored as runs of neighbouring blocks in each row of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2
DOUBT = 3  # while a map is made: not looked at yet


class Segments(NamedTuple):
    """Neighbouring blocks of one row and one kind: integer tensors of one length."""

    row: Tensor
    start: Tensor  # first block column
    stop: Tensor  # one past the last
    kind: Tensor

    def take(self, index: Tensor) -> Segments:
        return Segments(*(x.index_select(0, index) for x in self))

    def joined(self) -> Segments:
        """Each as long as the following ones continue it."""
        row, start, stop, kind = self
        seam = (row[1:] != row[:-1]) | (start[1:] != stop[:-1]) | (kind[1:] != kind[:-1])
        seam = seam.nonzero().flatten() + 1
        first = torch.cat([seam.new_zeros(min(len(row), 1)), seam])
        last = torch.cat([seam - 1, seam.new_full((min(len(row), 1),), len(row) - 1)])
        return self.take(first)._replace(stop=stop[last])

    def blocks(self) -> Segments:
        """One segment a block."""
        lengths = self.stop - self.start
        ends = lengths.cumsum(0)
        count = int(ends[-1]) if len(ends) else 0
        index = torch.arange(len(ends), device=ends.device)
        owner = index.repeat_interleave(lengths, output_size=count)
        shift = (self.start - ends + lengths).index_select(0, owner)
        row, column = self.row.index_select(0, owner), torch.arange(count, device=ends.device)
        column = column + shift
        return Segments(row, column, column + 1, self.kind.index_select(0, owner))


@dataclass(frozen=True, eq=False)
class Runs:
    """Live blocks of every row: row r owns the entries spans[r, 0] : spans[r, 1] of the table.

    Rows are (plane, query block) flattened, where a plane is one (batch, head) of the map. Rows
    that are alike may own the same entries. In a row, runs ascend and do not overlap; an entry
    may be empty (start == stop).
    """

    spans: Tensor  # int32 [rows, 2]
    table: Tensor  # int32 [runs, 3]: start, stop (block columns), kind

    @staticmethod
    def from_segments(segments: Segments, rows: int, columns: int) -> Runs:
        """From live segments in any order that do not overlap."""
        wide = rows * (columns + 1) >= 2**31 or columns >= 2**29
        dtype = torch.int64 if wide else torch.int32
        row, start, stop, kind = (x.to(dtype) for x in segments)
        key, order = (row * (columns + 1) + start).sort()
        rest = (stop * 4 + kind)[order]
        row = key.div(columns + 1, rounding_mode="trunc")
        return Runs.from_sorted(Segments(row, key - row * (columns + 1), rest >> 2, rest & 3), rows)

    @staticmethod
    def from_sorted(segments: Segments, rows: int) -> Runs:
        """From live segments by row and column; neighbours of one kind are joined."""
        if not len(segments.row):
            return Runs.nothing(rows, segments.row.device)
        row, start, stop, kind = segments.joined()
        each = torch.arange(rows, device=row.device, dtype=row.dtype)
        ends = [torch.searchsorted(row, each, right=right) for right in (False, True)]
        table = torch.stack([start, stop, kind], 1)
        return Runs(torch.stack(ends, 1).int(), table.int())

    @staticmethod
    def from_tiles(tiles: Tensor) -> Runs:
        """From a table of kinds [rows, columns]."""
        row, column = tiles.nonzero(as_tuple=True)
        return Runs.from_sorted(
            Segments(row, column, column + 1, tiles[row, column].long()), len(tiles)
        )

    @staticmethod
    def with_room(tiles: Tensor, room: int) -> Runs:
        """From a table of kinds [rows, columns] that has at most `room` runs a row.

        The number of entries follows from shapes alone, so nothing waits for the device.
        """
        rows, columns = tiles.shape
        border = torch.nn.functional.pad(tiles, (1, 1))
        begins = (tiles != border[:, :-2]) & (tiles != EMPTY)
        ends = (tiles != border[:, 2:]) & (tiles != EMPTY)
        count = begins.cumsum(1)
        column = torch.arange(columns, device=tiles.device).expand(rows, -1)
        table = torch.zeros(rows, room + 1, 3, dtype=torch.int64, device=tiles.device)
        for entry, where, value in ((0, begins, column), (1, ends, column + 1), (2, begins, tiles)):
            at = torch.where(where, count - 1, room)  # `room`: an entry that is dropped
            table[..., entry].scatter_(1, at, value.long())
        first = torch.arange(rows, device=tiles.device) * room
        last = first + count[:, -1] if columns else first
        return Runs(torch.stack([first, last], 1).int(), table[:, :room].reshape(-1, 3).int())

    @staticmethod
    def nothing(rows: int, device: torch.device) -> Runs:
        return Runs(
            torch.zeros(rows, 2, dtype=torch.int32, device=device),
            torch.zeros(0, 3, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> int:
        return len(self.spans)

    @cached_property
    def turned(self) -> dict[tuple[int, int], Runs]:
        """The same blocks by columns, for (planes, columns): filled by `BlockMask.transposed`."""
        return {}

    @cached_property
    def host(self) -> list[list[tuple[int, int, bool]]]:
        """Per row (start, stop, is_full), on the host: what the CPU engine walks."""
        entries = [(a, b, k == FULL) for a, b, k in self.table.tolist()]
        return [[e for e in entries[i:j] if e[0] < e[1]] for i, j in self.spans.tolist()]

    def segments(self) -> Segments:
        """All runs with their rows, int64, by row and column."""
        first, last = self.spans.long().unbind(1)
        counts = last - first
        row = torch.arange(self.rows, device=counts.device).repeat_interleave(counts)
        within = torch.arange(len(row), device=counts.device)
        before = counts.cumsum(0) - counts
        within = within - before.index_select(0, row)
        return Segments(row, *self.table[first[row] + within].long().unbind(1))

    def tiles(self, columns: int) -> Tensor:
        """The table of kinds, int8 [rows, columns]."""
        row, start, stop, kind = self.segments()
        # Kinds as differences between neighbours: a sum along the row restores them.
        steps = torch.zeros(self.rows, columns + 1, dtype=torch.int8, device=row.device)
        kind = kind.to(torch.int8)
        steps.index_put_((row, start), kind, accumulate=True)
        steps.index_put_((row, stop), -kind, accumulate=True)
        return steps[:, :columns].cumsum(1, dtype=torch.int8)

    def counts(self) -> tuple[int, int]:
        """How many blocks are partial and how many are full."""
        _, start, stop, kind = self.segments()
        full = int(((stop - start) * (kind == FULL)).sum())
        return int((stop - start).sum()) - full, full

    def to(self, device: torch.device | str) -> Runs:
        return Runs(self.spans.to(device), self.table.to(device))
