"""A map that is asked for while a graph is recorded, and made when somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flexmod.blocks.block_mask import BlockMask

Extents = tuple[int | None, int | None, int, int]


class Wanted(NamedTuple):
    """What `create_block_mask` was called with, and the function itself."""

    create: Callable[..., BlockMask]
    mask_mod: Callable[..., Any]
    extents: Extents  # B, H, Q_LEN, KV_LEN
    block_size: tuple[int, int]
    device: torch.device | str | None = None
    separate_full_blocks: bool = True


class PendingBlockMask(BlockMask):
    """Inside of torch.compile and torch.export: lengths and captured tensors have no values yet.

    An attention call decides the mask when the graph runs. Outside of the graph this is an
    ordinary map, made when it is first looked at.
    """

    wanted: Wanted

    def __init__(self, *wanted: Any) -> None:
        object.__setattr__(self, "wanted", Wanted(*wanted))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        wanted = self.__dict__["wanted"]
        made = wanted.create(
            wanted.mask_mod,
            *wanted.extents,
            device=wanted.device,
            BLOCK_SIZE=wanted.block_size,
            separate_full_blocks=wanted.separate_full_blocks,
        )
        self.__dict__.update(made.__dict__)
        object.__setattr__(self, "__class__", BlockMask)
        return getattr(self, name)
