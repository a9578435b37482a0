"""A map that is asked for while a graph is recorded, and made when somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flexmod.blocks.block_mask import BlockMask


class Wanted(NamedTuple):
    """What `create_block_mask` was called with."""

    mask_mod: Callable[..., Any]
    shape: tuple[int | None, int | None, int, int]
    block_size: tuple[int, int]
    separate_full_blocks: bool = True
    device: torch.device | str | None = None


class PendingBlockMask(BlockMask):
    """Inside of torch.compile and torch.export: lengths and captured tensors have no values yet.

    An attention call makes the map when the graph runs. Outside of the graph it is an ordinary
    map, made when first looked at.
    """

    wanted: Wanted

    def __init__(self, *wanted: Any) -> None:
        object.__setattr__(self, "wanted", Wanted(*wanted))

    def __getattr__(self, name: str) -> Any:
        from flexmod.blocks.create import create_block_mask

        if name.startswith("__"):
            raise AttributeError(name)
        mask_mod, shape, block_size, separate, device = self.__dict__["wanted"]
        made = create_block_mask(
            mask_mod, *shape, device, block_size, separate_full_blocks=separate
        )
        self.__dict__.update(made.__dict__)
        object.__setattr__(self, "__class__", BlockMask)
        return getattr(self, name)
