"""Block maps as lists and tables of blocks, in and out: torch's index lists, kinds, top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexmod import masks
from flexmod.blocks.overlay import shared
from flexmod.blocks.runs import FULL, PARTIAL, Runs
from flexmod.errors import BlockMaskError, DeviceError
from flexmod.program import trace

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask

BlockSize = int | tuple[int, int]
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

    Raises:
        BlockMaskError: for shapes, dtypes, ranges or orders that don't fit; it names the argument.
    """
    tiles = _scattered("kv", kv_num_blocks, kv_indices) * PARTIAL
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        raise BlockMaskError("full_kv_num_blocks and full_kv_indices must be given together")
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        full = _scattered("full_kv", full_kv_num_blocks, full_kv_indices) * FULL
        if full.shape != tiles.shape:
            raise BlockMaskError(
                f"full_kv_indices has shape {list(full.shape)}, kv_indices {list(tiles.shape)}"
            )
        if full.device != tiles.device:
            raise DeviceError(f"full_kv_indices is on {full.device}, kv_indices on {tiles.device}")
        if bool(((full != 0) & (tiles != 0)).any()):
            raise BlockMaskError("a block is in both kv_indices and full_kv_indices")
        tiles = tiles + full
    return _from_kinds(tiles, BLOCK_SIZE, mask_mod, seq_lengths)


def from_dense_blocks(
    blocks: Tensor,
    mask_mod: Callable[..., Any] | None = None,
    seq_lengths: tuple[int, int] | None = None,
    BLOCK_SIZE: BlockSize = 128,
) -> BlockMask:
    """A BlockMask from a table of blocks.

    Args:
        blocks: [B, H, rows, columns] or [rows, columns]; bool: which blocks are visible; or
            integers as `tiles()` gives them: 0 empty, 1 partial, 2 full.
        mask_mod: evaluated in partial blocks (in all visible ones, if `blocks` is bool); None:
            they are visible as a whole.
        seq_lengths: (Q_LEN, KV_LEN); default: all blocks are whole.

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
    if blocks.dtype != torch.bool and bool(((tiles < 0) | (tiles > FULL)).any()):
        raise BlockMaskError("blocks must hold 0 (empty), 1 (partial) or 2 (full)")
    return _from_kinds(tiles.to(torch.int8), BLOCK_SIZE, mask_mod, seq_lengths)


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
) -> BlockMask:
    """A BlockMask from the key blocks that each row of query blocks has chosen.

    Args:
        indices: integers [B, H, rows, k], in any order; -1 chooses nothing.
        KV_LEN: keys.
        mask_mod: evaluated in the chosen blocks; None: they are visible as a whole.
        Q_LEN: queries; default: rows whole blocks.

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
    if bool(((indices < -1) | (indices >= columns)).any()):
        raise BlockMaskError(f"indices must lie in [0, {columns}), or be -1")
    rows = indices.shape[2]
    tiles = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.int8, device=indices.device)
    tiles.scatter_(-1, torch.where(indices < 0, columns, indices).long(), PARTIAL)
    lengths = (rows * block[0] if Q_LEN is None else Q_LEN, KV_LEN)
    return _from_kinds(tiles[..., :columns], block, mask_mod, lengths)


def _from_kinds(
    tiles: Tensor,
    size: BlockSize,
    mask_mod: Callable[..., Any] | None,
    seq_lengths: tuple[int, int] | None,
) -> BlockMask:
    """From kinds, int8 [B, H, rows, columns]."""
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
    runs = Runs.from_tiles(_cut_short(kept, block, q_len, kv_len).flatten(0, 2))
    planes = kept.shape[0] * kept.shape[1]
    return BlockMask((batch, heads, q_len, kv_len), block, program, shared(runs, planes))


def _cut_short(tiles: Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> Tensor:
    """The kinds, with PARTIAL for full blocks that an end cuts short."""
    tiles = tiles.clone()
    if q_len % block[0]:
        tiles[:, :, -1].clamp_(max=PARTIAL)
    if kv_len % block[1]:
        tiles[..., -1].clamp_(max=PARTIAL)
    return tiles


def _scattered(name: str, counts: Tensor, indices: Tensor) -> Tensor:
    """1 where a block is listed, int8 [B, H, rows, columns]."""
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
    columns = indices.shape[-1]
    if bool(((counts < 0) | (counts > columns)).any()):
        raise BlockMaskError(f"{name}_num_blocks must lie in [0, {columns}]")
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    if bool((listed & ((indices < 0) | (indices >= columns))).any()):
        raise BlockMaskError(f"{name}_indices must lie in [0, {columns})")
    if bool((listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])).any()):
        raise BlockMaskError(
            f"{name}_indices must ascend in each row, and list no block twice; "
            "for blocks in any order use BlockMask.from_topk"
        )
    tiles = torch.zeros(indices.shape, dtype=torch.int8, device=indices.device)
    return tiles.scatter_add_(-1, torch.where(listed, indices, 0).long(), listed.to(torch.int8))


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
