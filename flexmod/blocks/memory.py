"""Maps of masks that capture no tensors, kept by content, for calls with a plain function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from flexmod.blocks.block_mask import BlockMask
from flexmod.program import Program
from flexmod.program.transforms import is_wrapped

_KEPT = 32
_memory: OrderedDict[Hashable, BlockMask] = OrderedDict()


def map_of(
    program: Program,
    shape: tuple[int, int, int, int],
    block_size: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    """The map of a mask, made anew only if it may differ from one that was made before.

    Such a map is not for users, as they could change it in place.
    """
    if program.captures:
        return BlockMask.from_program(program, shape, block_size, device)
    content = (program.identity, program.name, shape, block_size, device)
    found = _memory.get(content)
    if found is None:
        with torch.inference_mode(False):
            found = BlockMask.from_program(program, shape, block_size, device)
        if not is_lasting(found):
            return found
        if is_wrapped(found.runs.table):  # it ends with the transform that it was made in
            return found
        _memory[content] = found
        if len(_memory) > _KEPT:
            _memory.popitem(last=False)
    else:
        _memory.move_to_end(content)
    return found


def in_blocks_of(mask: BlockMask, block_size: tuple[int, int]) -> BlockMask:
    """A map in blocks of another size. A graph has a new map at each call, so it is looked up by
    content where a mask captures no tensors."""
    if block_size == mask.block_size or mask.program.captures:
        return mask.regrid(block_size)
    return map_of(mask.program, mask.shape, block_size, mask.device)


def is_lasting(mask: BlockMask) -> bool:
    """Whether a map's tensors outlive a mode or a torch.func transform that it was made under."""
    table = mask.runs.table
    return type(table) is torch.Tensor and not is_wrapped(table)
