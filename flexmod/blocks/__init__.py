"""Block maps: which blocks of a mask are empty, partial or full, without evaluating all of it."""

from flexmod.blocks.block_mask import BlockMask
from flexmod.blocks.create import create_block_mask, create_mask

__all__ = ["BlockMask", "create_block_mask", "create_mask"]
