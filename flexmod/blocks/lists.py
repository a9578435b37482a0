"""Block maps as torch's index lists, in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmod.blocks.given import BlockSize, from_kinds
from flexmod.blocks.runs import FULL, PARTIAL
from flexmod.errors import BlockMaskError, DeviceError

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask

# In torch's order. "q_" lists are those of the transposed map.
VIEWS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def view(tiles: Tensor, name: str) -> Tensor:
    """One of torch's index lists, from kinds [B, H, query blocks, key blocks].

    `*_num_blocks` is int32 [B, H, rows]; `*_indices` int32 [B, H, rows, columns]: the selected
    columns first, ascending, then the others.
    """
    kind = FULL if name.startswith("full_") else PARTIAL
    table = tiles if "kv_" in name else tiles.transpose(-1, -2)
    selected = table == kind
    if name.endswith("num_blocks"):
        return selected.sum(-1).int()
    return torch.argsort(selected.int(), dim=-1, descending=True, stable=True).int()


def from_kv_blocks(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None = None,
    full_kv_indices: Tensor | None = None,
    BLOCK_SIZE: BlockSize = 128,
    mask_mod: Callable[..., Any] | None = None,
    seq_lengths: tuple[int, int] | None = None,
    compute_q_blocks: bool = True,
    static: bool = False,
) -> BlockMask:
    """A BlockMask from lists of key blocks for each row of query blocks.

    Args:
        kv_num_blocks: int32 [B, H, rows], how many entries of `kv_indices` count.
        kv_indices: int32 [B, H, rows, columns], key blocks in which `mask_mod` is evaluated;
            those that count ascend.
        full_kv_num_blocks, full_kv_indices: key blocks that are visible as a whole.
        BLOCK_SIZE: tokens of a block, one number or (query, key).
        mask_mod: evaluated in the blocks of `kv_indices`; None: they are visible as a whole.
        seq_lengths: (Q_LEN, KV_LEN); default: all blocks are whole.
        compute_q_blocks: torch's; here the lists of query blocks are made when somebody reads them.
        static: True: nothing waits for the device, as a CUDA graph needs it. Values are not
            checked: an index out of range lists nothing. There is room for any number of runs.

    Raises:
        BlockMaskError: for shapes, dtypes, ranges or orders that don't fit; it names the argument.
    """
    tiles = _scattered("kv", kv_num_blocks, kv_indices, static) * PARTIAL
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        raise BlockMaskError("full_kv_num_blocks and full_kv_indices must be given together")
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        full = _scattered("full_kv", full_kv_num_blocks, full_kv_indices, static) * FULL
        if full.shape != tiles.shape:
            raise BlockMaskError(
                f"full_kv_indices has shape {list(full.shape)}, kv_indices {list(tiles.shape)}"
            )
        if full.device != tiles.device:
            raise DeviceError(f"full_kv_indices is on {full.device}, kv_indices on {tiles.device}")
        if not static and bool(((full != 0) & (tiles != 0)).any()):
            raise BlockMaskError("a block is in both kv_indices and full_kv_indices")
        tiles = torch.where(tiles != 0, tiles, full)
    room = tiles.shape[-1] if static else None
    return from_kinds(tiles, BLOCK_SIZE, mask_mod, seq_lengths, room)


def _scattered(name: str, counts: Tensor, indices: Tensor, static: bool) -> Tensor:
    """1 where a block is listed, int8 [B, H, rows, columns]."""
    _check_lists(name, counts, indices)
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    outside = (indices < 0) | (indices >= columns)
    if not static:
        _check_values(name, counts, indices, listed, outside)
    listed = listed & ~outside
    tiles = torch.zeros(indices.shape, dtype=torch.int8, device=indices.device)
    tiles.scatter_add_(-1, torch.where(listed, indices, 0).long(), listed.to(torch.int8))
    return tiles.clamp_(max=1)


def _check_lists(name: str, counts: Tensor, indices: Tensor) -> None:
    for label, tensor in ((f"{name}_num_blocks", counts), (f"{name}_indices", indices)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BlockMaskError(f"{label} must be int32, not {found}")
    if indices.ndim != 4 or counts.shape != indices.shape[:3]:
        raise BlockMaskError(
            f"{name}_num_blocks must be [B, H, rows] and {name}_indices [B, H, rows, columns]; "
            f"got {list(counts.shape)} and {list(indices.shape)}"
        )
    if counts.device != indices.device:
        raise DeviceError(
            f"{name}_num_blocks is on {counts.device}, {name}_indices on {indices.device}"
        )


def _check_values(
    name: str, counts: Tensor, indices: Tensor, listed: Tensor, outside: Tensor
) -> None:
    columns = indices.shape[-1]
    if bool(((counts < 0) | (counts > columns)).any()):
        raise BlockMaskError(f"{name}_num_blocks must lie in [0, {columns}]")
    if bool((listed & outside).any()):
        raise BlockMaskError(f"{name}_indices must lie in [0, {columns})")
    if bool((listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])).any()):
        raise BlockMaskError(
            f"{name}_indices must ascend in each row, and list no block twice; "
            "for blocks in any order use BlockMask.from_topk"
        )
