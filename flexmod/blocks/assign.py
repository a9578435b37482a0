"""Maps changed in place, as torch's programs do: their `mask_mod` and their `seq_lengths`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexmod.errors import BlockMaskError
from flexmod.program import trace

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask


def assign(mask: BlockMask, name: str, value: Any) -> None:
    """Take a new mask, or new lengths, and decide the blocks anew.

    A part of a map has its mask already, so what torch's programs set after slicing is not
    needed here, but right all the same.
    """
    program, shape = mask.program, mask.shape
    if name == "mask_mod":
        program = trace(value, "mask", device=mask.device)
    elif name == "seq_lengths":
        q_len, kv_len = value
        shape = (*shape[:2], int(q_len), int(kv_len))
    else:
        raise BlockMaskError(f"a BlockMask's {name} cannot be set: make another map")
    made = type(mask).from_program(program, shape, mask.block_size, mask.device)
    mask.__dict__.clear()
    mask.__dict__.update(made.__dict__)
