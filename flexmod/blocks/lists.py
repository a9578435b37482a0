"""Block maps as torch's index lists, in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmod.blocks.runs import FULL, PARTIAL, Runs
from flexmod.errors import BlockMaskError
from flexmod.program import trace

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
    BLOCK_SIZE: int | tuple[int, int] = 128,
    mask_mod: Callable[..., Any] | None = None,
    seq_lengths: tuple[int, int] | None = None,
) -> BlockMask:
    """A BlockMask from lists of key blocks for each row of query blocks.

    Args:
        kv_num_blocks: int32 [B, H, rows], how many entries of `kv_indices` count.
        kv_indices: int32 [B, H, rows, columns], key blocks in which `mask_mod` is evaluated.
        full_kv_num_blocks, full_kv_indices: key blocks that are visible as a whole.
        BLOCK_SIZE: tokens of a block, one number or (query, key).
        mask_mod: evaluated in the blocks of `kv_indices`; None: they are visible as a whole.
        seq_lengths: (Q_LEN, KV_LEN); default: all blocks are whole.

    Raises:
        BlockMaskError: for shapes, dtypes or ranges that don't fit together.
    """
    from flexmod.blocks.block_mask import BlockMask
    from flexmod.blocks.create import check_block_size

    block = check_block_size(BLOCK_SIZE)
    tiles = _scatter("kv", kv_num_blocks, kv_indices, PARTIAL)
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        raise BlockMaskError("full_kv_num_blocks and full_kv_indices must be given together")
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        full = _scatter("full_kv", full_kv_num_blocks, full_kv_indices, FULL)
        if full.shape != tiles.shape:
            raise BlockMaskError(
                f"full_kv_indices has shape {list(full.shape)}, kv_indices {list(tiles.shape)}"
            )
        if bool(((full != 0) & (tiles != 0)).any()):
            raise BlockMaskError("a block is in both kv_indices and full_kv_indices")
        tiles = tiles + full
    batch, heads, rows, columns = tiles.shape
    q_len, kv_len = seq_lengths or (rows * block[0], columns * block[1])
    if (-(-q_len // block[0]), -(-kv_len // block[1])) != (rows, columns):
        raise BlockMaskError(
            f"seq_lengths ({q_len}, {kv_len}) need {-(-q_len // block[0])} x "
            f"{-(-kv_len // block[1])} blocks; the lists have {rows} x {columns}"
        )
    program = trace(_listed(tiles, block, mask_mod), "mask", device=tiles.device)
    batch_kept = batch if "b" in program.reads else 1
    heads_kept = heads if "h" in program.reads else 1
    runs = Runs.from_tiles(tiles[:batch_kept, :heads_kept].flatten(0, 2))
    return BlockMask(
        (batch, heads, q_len, kv_len),
        block,
        program,
        runs,
        (0,) * 0 or tuple(c._version for c in program.captures),
    )


def _scatter(name: str, counts: Tensor, indices: Tensor, kind: int) -> Tensor:
    """Kinds [B, H, rows, columns] of the listed blocks."""
    for label, tensor in ((f"{name}_num_blocks", counts), (f"{name}_indices", indices)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise BlockMaskError(f"{label} must be int32, not {tensor.dtype}")
    if indices.ndim != 4 or counts.shape != indices.shape[:3]:
        raise BlockMaskError(
            f"{name}_num_blocks must be [B, H, rows] and {name}_indices [B, H, rows, columns]; "
            f"got {list(counts.shape)} and {list(indices.shape)}"
        )
    columns = indices.shape[-1]
    if bool(((counts < 0) | (counts > columns)).any()):
        raise BlockMaskError(f"{name}_num_blocks must lie in [0, {columns}]")
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    if bool((listed & ((indices < 0) | (indices >= columns))).any()):
        raise BlockMaskError(f"{name}_indices must lie in [0, {columns})")
    tiles = torch.zeros(indices.shape, dtype=torch.int8, device=indices.device)
    safe = torch.where(listed, indices, 0).long()
    tiles.scatter_add_(-1, safe, listed.to(torch.int8))
    if bool((tiles > 1).any()):
        raise BlockMaskError(f"{name}_indices lists a block twice in one row")
    return tiles * kind


def _listed(
    tiles: Tensor, block: tuple[int, int], mask_mod: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The mask that a table of kinds stands for, token by token."""
    batch, heads = tiles.shape[:2]
    block_q, block_kv = block

    def listed_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        plane = tiles[b if batch > 1 else 0, h if heads > 1 else 0]
        kind = plane[q_idx // block_q, kv_idx // block_kv]
        if mask_mod is None:
            return kind > 0
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return listed_blocks
