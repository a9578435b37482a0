"""Parts of maps, and maps in other frames: runs are cut, not made anew; the mask goes along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmod.blocks.classify import settle
from flexmod.blocks.grid import Grid
from flexmod.blocks.rewrite import Change, Indices, constant, joined, reindexed, within
from flexmod.blocks.runs import DOUBT, Runs, Segments
from flexmod.errors import BlockMaskError
from flexmod.program import Program

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask


@dataclass(frozen=True)
class _Choice:
    """Positions picked from one axis: consecutive ones, or a table of them."""

    start: int
    length: int
    table: Tensor | None = None

    @property
    def index(self) -> Tensor | slice:
        if self.table is not None:
            return self.table
        return slice(self.start, self.start + self.length)


def take(mask: BlockMask, index: Any) -> BlockMask:
    """`mask[b, h, q_blocks]`: ints keep their axis; slices and 1-D integer tensors too."""
    mask.check_unchanged()
    items = index if isinstance(index, tuple) else (index,)
    if len(items) > 3:
        raise BlockMaskError("index a map with [b, h, q_blocks]: at most three indices")
    items = items + (slice(None),) * (3 - len(items))
    lengths = (*mask.shape[:2], mask.grid.rows)
    names = ("b", "h", "q_blocks")
    batch, heads, rows = (
        _choice(name, item, length, mask.device)
        for name, item, length in zip(names, items, lengths, strict=True)
    )
    old, reads = mask.grid, mask.program.reads
    spans = mask.runs.spans.view(old.batch, old.heads, old.rows, 2)
    spans = spans[batch.index] if "b" in reads else spans[: min(batch.length, 1)]
    spans = spans[:, heads.index] if "h" in reads else spans[:, : min(heads.length, 1)]
    spans = spans[:, :, rows.index].reshape(-1, 2).contiguous()
    changes = {**_plane_change("b", batch), **_plane_change("h", heads), **_row_change(rows, old)}
    program = reindexed(mask.program, mask.device, **changes)
    q_start = rows.start * old.block_q if rows.table is None else 0
    shape = (batch.length, heads.length, _height(rows, old), old.kv_len)
    offset = (mask.offset[0] + q_start, mask.offset[1])
    return replace(
        mask, shape=shape, program=program, runs=Runs(spans, mask.runs.table), offset=offset
    )


def _choice(name: str, item: Any, length: int, device: torch.device) -> _Choice:
    if isinstance(item, int) and not isinstance(item, bool):
        if not -length <= item < length:
            raise BlockMaskError(f"{name} is {item}, but the map has {length}")
        return _Choice(item % length, 1)
    if isinstance(item, slice):
        found = range(length)[item]
        if found.step == 1 or len(found) < 2:
            return _Choice(found.start if len(found) else 0, len(found))
        item = torch.tensor(list(found), device=device)
    if isinstance(item, Sequence) and not isinstance(item, str):
        item = torch.tensor(item, dtype=torch.long if not item else None, device=device)
    if isinstance(item, Tensor) and not item.is_floating_point() and item.ndim <= 1:
        if item.dtype == torch.bool:
            if len(item) != length:
                raise BlockMaskError(f"{name} has {len(item)} flags, but the map has {length}")
            item = item.nonzero()
        table = item.to(device, torch.long).flatten()
        if bool(((table < -length) | (table >= length)).any()):
            raise BlockMaskError(f"{name} must lie in [0, {length})")
        if len(table) < 2:
            return _Choice(int(table % length) if len(table) else 0, len(table))
        return _Choice(0, len(table), table % length)
    raise BlockMaskError(
        f"{name} must be an int, a slice or a 1-D integer tensor, not {type(item).__name__}"
    )


def _plane_change(name: str, choice: _Choice) -> dict[str, Change]:
    if choice.table is not None:
        return {name: _looked_up(choice.table)}
    if choice.length == 1:
        return {name: constant(choice.start)}
    return {name: lambda index: index + choice.start} if choice.start else {}


def _row_change(choice: _Choice, grid: Grid) -> dict[str, Change]:
    size = grid.block_q
    if choice.table is not None:
        start = _looked_up(choice.table * size)
        return {"q_idx": lambda index: start(index // size) + index % size}
    return {"q_idx": lambda index: index + choice.start * size} if choice.start else {}


def _looked_up(table: Tensor) -> Change:
    return lambda index: index.recorder.load(table, [index])


def _height(choice: _Choice, grid: Grid) -> int:
    """Query rows in chosen blocks; the block that an end cuts short can only come last."""
    whole, size = choice.length * grid.block_q, grid.block_q
    short = grid.rows * size - grid.q_len
    if choice.table is None or not short:
        return min(whole, grid.q_len - choice.start * size)
    last = choice.table == grid.rows - 1
    if bool(last[:-1].any()):
        raise BlockMaskError(
            f"q_blocks holds the last block ({grid.rows - 1}), which has {size - short} rows "
            f"of {size}: it can only be taken last"
        )
    return whole - short * int(last[-1])


def crop(mask: BlockMask, q_len: int | None = None, kv_len: int | None = None) -> BlockMask:
    """The first q_len query rows and kv_len keys. Blocks that are now cut are looked at again."""
    mask.check_unchanged()
    old = mask.grid
    lengths = _length("q_len", q_len, old.q_len), _length("kv_len", kv_len, old.kv_len)
    new = old._replace(q_len=min(lengths[0], old.q_len), kv_len=min(lengths[1], old.kv_len))
    if lengths != new[2:4]:
        raise BlockMaskError(
            f"crop cannot grow ({old.q_len}, {old.kv_len}) to {lengths}: use pad, or make a new map"
        )
    spans = mask.runs.spans.view(old.planes, old.rows, 2)[:, : new.rows].reshape(-1, 2)
    row, start, stop, kind = Runs(spans.contiguous(), mask.runs.table).segments()
    segments = Segments(row, start, stop.clamp(max=new.columns), kind)
    segments = segments.take((start < new.columns).nonzero().flatten())
    cuts = [cut and n < o for cut, n, o in zip(new.cuts, new[2:4], old[2:4], strict=True)]
    runs = settle(mask.program, new, doubtful_edges(segments, new, *cuts))
    return replace(mask, shape=(*mask.shape[:2], *new[2:4]), runs=runs)


def doubtful_edges(segments: Segments, grid: Grid, last_row: bool, last_column: bool) -> Segments:
    """The segments with their blocks in the last row, in the last column, called DOUBT."""
    if last_row:
        kind = torch.where(segments.row % grid.rows == grid.rows - 1, DOUBT, segments.kind)
        segments = segments._replace(kind=kind)
    if last_column:
        row, start, stop, kind = segments
        at_end = ((stop == grid.columns) & (start < stop)).nonzero().flatten()
        edge = Segments(row, stop - 1, stop, torch.full_like(kind, DOUBT)).take(at_end)
        short = Segments(row, start, stop.clamp(max=grid.columns - 1), kind)
        short = short.take((short.start < short.stop).nonzero().flatten())
        segments = Segments(*(torch.cat(pair) for pair in zip(short, edge, strict=True)))
    return segments


def pad(mask: BlockMask, q_len: int | None = None, kv_len: int | None = None) -> BlockMask:
    """The map with hidden query rows and keys after its own, up to the given lengths."""
    mask.check_unchanged()
    old = mask.grid
    new = old._replace(
        q_len=_length("q_len", q_len, old.q_len), kv_len=_length("kv_len", kv_len, old.kv_len)
    )
    if new.q_len < old.q_len or new.kv_len < old.kv_len:
        raise BlockMaskError(
            f"pad cannot shrink ({old.q_len}, {old.kv_len}) to {tuple(new[2:4])}: use crop"
        )
    spans = mask.runs.spans.view(old.planes, old.rows, 2)
    more = spans.new_zeros(old.planes, new.rows - old.rows, 2)
    runs = Runs(torch.cat([spans, more], 1).view(-1, 2), mask.runs.table)

    def inside(indices: Indices, call: Any) -> Any:
        q, kv = indices["q_idx"], indices["kv_idx"]
        visible = (q < old.q_len) & (kv < old.kv_len)
        if not (old.q_len and old.kv_len):
            return visible
        moved = {"q_idx": within(old.q_len)(q), "kv_idx": within(old.kv_len)(kv)}
        return visible & call(mask.program, {**indices, **moved})

    program = mask.program
    if new != old:
        program = joined(program.name, (program,), mask.device, inside)
    return replace(mask, shape=(*mask.shape[:2], *new[2:4]), program=program, runs=runs)


def shift(mask: BlockMask, q_offset: int = 0, kv_offset: int = 0) -> BlockMask:
    """The mask shown q_idx + q_offset and kv_idx + kv_offset, over the same lengths: made anew."""
    mask.check_unchanged()
    for name, value in (("q_offset", q_offset), ("kv_offset", kv_offset)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise BlockMaskError(f"{name} must be an int, not {value!r}")
    program: Program = reindexed(
        mask.program,
        mask.device,
        q_idx=lambda index: index + q_offset,
        kv_idx=lambda index: index + kv_offset,
    )
    made = type(mask).from_program(program, mask.shape, mask.block_size, mask.device)
    return replace(made, offset=(mask.offset[0] + q_offset, mask.offset[1] + kv_offset))


def _length(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BlockMaskError(f"{name} must be an int >= 0, not {value!r}")
    return value
