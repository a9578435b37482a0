"""Maps in files and in copies: what is saved is the mask's program, so lambdas are no obstacle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flexmod.blocks.runs import Runs
from flexmod.errors import ArgumentError, BlockMaskError
from flexmod.program import text

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask


def reduce(mask: BlockMask) -> tuple[Any, ...]:
    """For pickle, copy and torch.save: plain tuples and tensors."""
    mask.check_unchanged()
    program = mask.program
    sites = {position: str(site) for position, site in program.sites.items()}
    saved = (text.structure(program), program.name, program.numbers, sites)
    place = (tuple(mask.shape), tuple(mask.block_size), tuple(mask.offset))
    return restored, (place, saved, list(program.captures), mask.runs.spans, mask.runs.table)


def restored(
    place: tuple[Any, ...],
    saved: tuple[Any, ...],
    captures: list[torch.Tensor],
    spans: torch.Tensor,
    table: torch.Tensor,
) -> BlockMask:
    """A saved map. It is checked, as a kernel trusts the runs of a map."""
    from flexmod.blocks.block_mask import BlockMask

    shape, block_size, offset = place
    structure, name, numbers, sites = saved
    try:
        program = text.restored(structure, name, numbers, captures, sites)
    except ArgumentError as error:
        raise BlockMaskError(str(error)) from None
    mask = BlockMask(shape, block_size, program, Runs(spans, table), offset)
    _check_runs(mask)
    return mask


def _check_runs(mask: BlockMask) -> None:
    grid, runs = mask.grid, mask.runs
    start, stop, kind = runs.table.unbind(1)
    sound = (
        runs.spans.shape == (grid.planes * grid.rows, 2)
        and not bool(((runs.spans < 0) | (runs.spans > len(runs.table))).any())
        and not bool(((start < 0) | (stop > grid.columns) | (kind < 1) | (kind > 2)).any())
    )
    if not sound:
        raise BlockMaskError("the saved runs do not fit the shape of the map")


def update_(mask: BlockMask, other: BlockMask) -> BlockMask:
    """Take over the mask and the runs of another map of the same kind, in place.

    No memory is allocated and nothing waits for the device, so it works inside a CUDA graph: a
    kernel that reads this map reads the new one. Maps of `from_documents`, `from_window` and
    `from_prefix_lengths`, and those made with `static=True`, have as many runs as their shape
    says; others must not have more runs than this one had when it was made.

    Raises:
        BlockMaskError: for another shape, block size, mask or more runs.
    """
    for name in ("shape", "block_size", "offset"):
        if getattr(mask, name) != getattr(other, name):
            raise BlockMaskError(
                f"other has {name} {getattr(other, name)}, this map {getattr(mask, name)}"
            )
    mine, theirs = mask.program, other.program
    shapes = [c.shape for c in mine.captures] == [c.shape for c in theirs.captures]
    if mine.structure != theirs.structure or mine.numbers != theirs.numbers or not shapes:
        raise BlockMaskError(
            f"other's mask {theirs.name} differs from {mine.name} in more than the values of the "
            "tensors that it captures"
        )
    pairs = [(mask.runs, other.runs)]
    if "transposed" in mask.__dict__:
        pairs.append((mask.transposed, other.transposed))
    for old, new in pairs:
        if len(new.table) > len(old.table):
            raise BlockMaskError(
                f"other has {len(new.table)} runs, and this map room for {len(old.table)}"
            )
    for old, new in pairs:
        old.spans.copy_(new.spans)
        old.table[: len(new.table)].copy_(new.table)
        old.__dict__.pop("host", None)
        old.turned.clear()
    for mine_tensor, their_tensor in zip(mine.captures, theirs.captures, strict=True):
        if mine_tensor.data_ptr() != their_tensor.data_ptr():
            mine_tensor.copy_(their_tensor)
    mask._regridded.clear()
    mask._moved.clear()
    for name in ("_made_from", "versions"):
        object.__setattr__(mask, name, getattr(replace(mask), name))
    return mask


torch.serialization.add_safe_globals([restored])
