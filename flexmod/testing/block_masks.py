"""A block map against its own mask, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .oracle import visible

_EMPTY, _PARTIAL, _FULL = 0, 1, 2


def check_block_mask(
    block_mask: Any,
    mask_mod: Callable[..., Any] | None = None,
    *,
    rows: int | None = None,
    exact: bool = True,
    seed: int = 0,
) -> None:
    """Assert that a map is right: no visible token in an empty block, no hidden one in a full one.

    Args:
        block_mask: a `flexmod.BlockMask`.
        mask_mod: the mask as an untraced function, to check the map's own mask too.
        rows: how many rows of blocks to look at, drawn by `seed`; None: all of them.
        exact: also assert that no partial block could be called empty or full. True for masks of
            integers; a mask that compares floats may be cautious.

    Raises:
        AssertionError: naming the first block that is wrong.

    Example:
        >>> import flexmod
        >>> causal = flexmod.masks.causal()
        >>> check_block_mask(flexmod.create_block_mask(causal, None, None, 300, 300), causal)
    """
    batch, heads, q_len, kv_len = block_mask.shape
    high, wide = block_mask.block_size
    count = -(-q_len // high)
    chosen = torch.arange(count, device="cpu")
    if rows is not None and rows < count:
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
        chosen = drawn[:rows].sort().values
    for row in chosen.tolist():
        part = block_mask[:, :, row]
        height = min(high, q_len - row * high)
        assert part.shape == (batch, heads, height, kv_len), f"row {row} is cut to {part.shape}"
        first = torch.arange(height, device=block_mask.device) + row * high
        seen = block_mask.visible_rows(first)
        assert torch.equal(part.dense(), seen), f"row {row} of blocks, cut out, has another mask"
        if mask_mod is not None:
            user = visible(mask_mod, batch, heads, q_len, kv_len, block_mask.device, rows=first)
            assert torch.equal(seen, user), f"the mask differs from mask_mod in block row {row}"
        _check_row(part.tiles(), seen, row, (high, wide), exact)


def _check_row(
    tiles: Tensor, seen: Tensor, row: int, block_size: tuple[int, int], exact: bool
) -> None:
    """tiles [B, H, 1, columns] against tokens [B, H, height, KV]."""
    high, wide = block_size
    short = -seen.shape[-1] % wide
    some, every = (
        torch.nn.functional.pad(x, (0, short), value=fill).unflatten(-1, (-1, wide))
        for x, fill in ((seen, False), (seen, True))
    )
    some, every = some.any(-1).any(2, keepdim=True), every.all(-1).all(2, keepdim=True)
    whole = torch.full_like(every, seen.shape[2] == high)
    if short:
        whole[..., -1] = False
    right = torch.where(every & whole, _FULL, torch.where(some, _PARTIAL, _EMPTY))
    wrong = tiles != right
    if not exact:
        wrong &= tiles != _PARTIAL
    if wrong.any():
        b, h, _, column = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"block (b={b}, h={h}, row={row}, column={column}) is {_name(tiles[b, h, 0, column])}, "
            f"but its tokens say {_name(right[b, h, 0, column])}"
        )


def _name(kind: Tensor) -> str:
    return ("empty", "partial", "full")[int(kind)]
