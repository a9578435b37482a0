"""Block maps from what is known of their blocks: tables of kinds, chosen blocks, dense masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexmod import masks
from flexmod.blocks.overlay import shared
from flexmod.blocks.runs import FULL, PARTIAL, Runs
from flexmod.errors import BlockMaskError
from flexmod.program import trace

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask

BlockSize = int | tuple[int, int]


def from_dense_blocks(
    blocks: Tensor,
    mask_mod: Callable[..., Any] | None = None,
    seq_lengths: tuple[int, int] | None = None,
    BLOCK_SIZE: BlockSize = 128,
    static: bool = False,
) -> BlockMask:
    """A BlockMask from a table of blocks.

    Args:
        blocks: [B, H, rows, columns] or [rows, columns]; bool: which blocks are visible; or
            integers as `tiles()` gives them: 0 empty, 1 partial, 2 full.
        mask_mod: evaluated in partial blocks (in all visible ones, if `blocks` is bool); None:
            they are visible as a whole.
        seq_lengths: (Q_LEN, KV_LEN); default: all blocks are whole.
        static: as in `from_kv_blocks`.

    Example:
        >>> import torch, flexmod
        >>> flexmod.BlockMask.from_dense_blocks(torch.eye(4, dtype=torch.bool)).counts()
        (12, 4, 0)
    """
    if not isinstance(blocks, Tensor) or blocks.is_floating_point():
        raise BlockMaskError("blocks must be a tensor of bool or integers")
    tiles = blocks[None, None] if blocks.ndim == 2 else blocks
    if tiles.ndim != 4:
        raise BlockMaskError(
            f"blocks must be [B, H, rows, columns] or [rows, columns], not {list(blocks.shape)}"
        )
    if not static and blocks.dtype != torch.bool and bool(((tiles < 0) | (tiles > FULL)).any()):
        raise BlockMaskError("blocks must hold 0 (empty), 1 (partial) or 2 (full)")
    tiles = tiles.to(torch.int8).clamp(0, FULL)
    room = tiles.shape[-1] if static else None
    return from_kinds(tiles, BLOCK_SIZE, mask_mod, seq_lengths, room)


def from_dense(visible: Tensor, BLOCK_SIZE: BlockSize = 128) -> BlockMask:
    """A BlockMask from a mask that is written out, token by token.

    It keeps the tensor, which is read in partial blocks. A function of the indices needs no
    tensor, and `create_block_mask` looks at few of its elements.

    Args:
        visible: bool [B or 1, H or 1, Q_LEN, KV_LEN].

    Example:
        >>> import torch, flexmod
        >>> visible = torch.ones(1, 1, 300, 256, dtype=torch.bool).tril()
        >>> flexmod.BlockMask.from_dense(visible).tiles()[0, 0].tolist()
        [[1, 0], [2, 1], [1, 1]]
    """
    from flexmod.blocks.block_mask import BlockMask
    from flexmod.blocks.create import check_block_size

    if not isinstance(visible, Tensor) or visible.dtype != torch.bool or visible.ndim != 4:
        found = type(visible).__name__
        if isinstance(visible, Tensor):
            found = f"{visible.dtype} of shape {list(visible.shape)}"
        raise BlockMaskError(f"visible must be bool [B, H, Q_LEN, KV_LEN], not {found}")
    batch, heads, q_len, kv_len = visible.shape
    block = check_block_size(BLOCK_SIZE)
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    # Padded with False, so that a block that an end cuts short is never FULL.
    padded = pad(visible, (0, columns * block[1] - kv_len, 0, rows * block[0] - q_len))
    cells = padded.view(batch, heads, rows, block[0], columns, block[1])
    tiles = cells.amax((3, 5)).to(torch.int8) + cells.amin((3, 5)).to(torch.int8)

    def written_out(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return visible[b if batch > 1 else 0, h if heads > 1 else 0, q_idx, kv_idx]

    mask_mod = written_out if visible.numel() else masks.noop_mask  # nothing can be read
    program = trace(mask_mod, "mask", device=visible.device)
    runs = shared(Runs.from_tiles(tiles.flatten(0, 2)), batch * heads)
    return BlockMask((batch, heads, q_len, kv_len), block, program, runs)


def from_topk(
    indices: Tensor,
    KV_LEN: int,
    mask_mod: Callable[..., Any] | None = None,
    Q_LEN: int | None = None,
    BLOCK_SIZE: BlockSize = 128,
    static: bool = False,
) -> BlockMask:
    """A BlockMask from the key blocks that each row of query blocks has chosen.

    Args:
        indices: integers [B, H, rows, k], in any order; -1 chooses nothing.
        KV_LEN: keys.
        mask_mod: evaluated in the chosen blocks; None: they are visible as a whole.
        Q_LEN: queries; default: rows whole blocks.
        static: as in `from_kv_blocks`; there is room for k runs a row.

    Example:
        >>> import torch, flexmod
        >>> chosen = torch.tensor([[[[0, 2], [1, -1]]]])
        >>> flexmod.BlockMask.from_topk(chosen, 512).tiles()[0, 0].tolist()
        [[1, 0, 1, 0], [0, 1, 0, 0]]
    """
    from flexmod.blocks.create import check_block_size

    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise BlockMaskError("indices must be a tensor of int32 or int64")
    if indices.ndim != 4:
        raise BlockMaskError(f"indices must be [B, H, rows, k], not {list(indices.shape)}")
    block = check_block_size(BLOCK_SIZE)
    columns = -(-KV_LEN // block[1])
    if not static and bool(((indices < -1) | (indices >= columns)).any()):
        raise BlockMaskError(f"indices must lie in [0, {columns}), or be -1")
    rows = indices.shape[2]
    tiles = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.int8, device=indices.device)
    nothing = (indices < 0) | (indices >= columns)
    tiles.scatter_(-1, torch.where(nothing, columns, indices).long(), PARTIAL)
    lengths = (rows * block[0] if Q_LEN is None else Q_LEN, KV_LEN)
    room = min(indices.shape[3], columns) if static else None
    return from_kinds(tiles[..., :columns], block, mask_mod, lengths, room)


def from_kinds(
    tiles: Tensor,
    size: BlockSize,
    mask_mod: Callable[..., Any] | None,
    seq_lengths: tuple[int, int] | None,
    room: int | None,
) -> BlockMask:
    """From kinds, int8 [B, H, rows, columns]. `room`: for how many runs a row; None: as needed."""
    from flexmod.blocks.block_mask import BlockMask
    from flexmod.blocks.create import check_block_size

    block = check_block_size(size)
    batch, heads, rows, columns = tiles.shape
    q_len, kv_len = seq_lengths or (rows * block[0], columns * block[1])
    if (-(-q_len // block[0]), -(-kv_len // block[1])) != (rows, columns):
        raise BlockMaskError(
            f"seq_lengths ({q_len}, {kv_len}) need {-(-q_len // block[0])} x "
            f"{-(-kv_len // block[1])} blocks; the lists have {rows} x {columns}"
        )
    program = trace(listed_blocks(tiles, block, mask_mod), "mask", device=tiles.device)
    kept = tiles[: batch if "b" in program.reads else 1, : heads if "h" in program.reads else 1]
    kinds = _cut_short(kept, block, q_len, kv_len).flatten(0, 2)
    if room is not None:
        runs = Runs.with_room(kinds, room)
    else:
        runs = shared(Runs.from_tiles(kinds), kept.shape[0] * kept.shape[1])
    return BlockMask((batch, heads, q_len, kv_len), block, program, runs)


def _cut_short(tiles: Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> Tensor:
    """The kinds, with PARTIAL for full blocks that an end cuts short."""
    tiles = tiles.clone()
    if q_len % block[0]:
        tiles[:, :, -1].clamp_(max=PARTIAL)
    if kv_len % block[1]:
        tiles[..., -1].clamp_(max=PARTIAL)
    return tiles


def listed_blocks(
    tiles: Tensor, block: tuple[int, int], mask_mod: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The mask that a table of kinds stands for, token by token."""
    batch, heads = tiles.shape[:2]
    block_q, block_kv = block

    def in_listed_block(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        plane = tiles[b if batch > 1 else 0, h if heads > 1 else 0]
        kind = plane[q_idx // block_q, kv_idx // block_kv]
        if mask_mod is None:
            return kind > 0
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return in_listed_block
