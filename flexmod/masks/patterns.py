"""Masks laid out by blocks, frames or a grid of positions."""

from __future__ import annotations

import torch

from flexmod.errors import ArgumentError
from flexmod.masks.arguments import MaskMod, whole


def bidirectional() -> MaskMod:
    """Everything is visible, as in an encoder; `noop_mask` as a function that makes it."""

    def bidirectional(b, h, q_idx, kv_idx):
        return kv_idx * 0 == 0

    return bidirectional


def chunked(size: int) -> MaskMod:
    """Both directions inside chunks of `size` positions, nothing across.

    Example: `chunked(2)` on 5 tokens: rows see 2, 2, 2, 2, 1 keys.
    Llama 4's (2025) local layers are `and_masks(causal(), chunked(8192))`.
    """
    size = whole("size", size)

    def chunked(b, h, q_idx, kv_idx):
        return q_idx // size == kv_idx // size

    return chunked


def block_causal(size: int) -> MaskMod:
    """Both directions inside a block of `size` positions, and all earlier blocks.

    Example: `block_causal(2)` on 5 tokens: rows see 2, 2, 4, 4, 5 keys.
    """
    size = whole("size", size)

    def block_causal(b, h, q_idx, kv_idx):
        return q_idx // size >= kv_idx // size

    return block_causal


def frame_block(frame: int, block: int) -> MaskMod:
    """The first `block` positions of every frame see and are seen by all; others their block.

    Example: `frame_block(24, 6)`: visible if i % 24 < 6, or j % 24 < 6, or i // 6 == j // 6.
    """
    frame, block = whole("frame", frame), whole("block", block)

    def frame_block(b, h, q_idx, kv_idx):
        heads = (q_idx % frame < block) | (kv_idx % frame < block)
        return heads | (q_idx // block == kv_idx // block)

    return frame_block


def global_tokens(count: int) -> MaskMod:
    """The first `count` positions see everything and are seen by everything.

    Example: `or_masks(symmetric_window(256), global_tokens(1))`. Source: Longformer (2020).
    """
    count = whole("count", count, 0)

    def global_tokens(b, h, q_idx, kv_idx):
        return (q_idx < count) | (kv_idx < count)

    return global_tokens


def natten_2d(height: int, width: int, kernel: int | tuple[int, int]) -> MaskMod:
    """Neighbourhood attention: the kernel x kernel positions around the query's own.

    The sequence is a height x width image, row by row. At an edge the neighbourhood is moved
    inside, so that every query sees exactly kernel*kernel keys (kernel[0]*kernel[1] of a pair).
    An even kernel reaches one further up and left than down and right.
    Example: `natten_2d(4, 4, 3)` shows the corner query 0 the keys 0, 1, 2, 4, 5, 6, 8, 9, 10.
    Source: Neighborhood Attention Transformer (2022), NATTEN.
    """
    height, width = whole("height", height), whole("width", width)
    tall, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    tall, wide = whole("kernel", tall), whole("kernel", wide)
    if tall > height or wide > width:
        grid, window = f"{height} x {width}", f"{tall} x {wide}"
        raise ArgumentError(f"kernel must fit into the {grid} grid, got {window}")

    def natten_2d(b, h, q_idx, kv_idx):
        top = torch.clamp(q_idx // width - tall // 2, 0, height - tall)
        left = torch.clamp(q_idx % width - wide // 2, 0, width - wide)
        row, column = kv_idx // width, kv_idx % width
        in_rows = (row >= top) & (row < top + tall)
        return in_rows & (column >= left) & (column < left + wide)

    return natten_2d


def random_blocks(
    q_len: int,
    kv_len: int,
    block: int,
    count: int,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> MaskMod:
    """Each block of `block` queries sees `count` different blocks of keys, drawn by `seed`.

    The draw is made here, once, so every engine and the backward see the same blocks. Lengths
    are those of the call the mask is for; the table lives on `device`.
    Example: `random_blocks(256, 256, 64, 2)`: 4 x 4 blocks, 2 of them visible in each row.
    Source: BigBird (2020).
    """
    block, count = whole("block", block), whole("count", count, 0)
    rows = -(-whole("q_len", q_len) // block)
    columns = -(-whole("kv_len", kv_len) // block)
    if count > columns:
        raise ArgumentError(f"count must be at most the {columns} blocks of keys, got {count}")
    generator = torch.Generator().manual_seed(whole("seed", seed, 0))
    drawn = torch.rand(rows, columns, generator=generator, device="cpu").topk(count).indices
    table = torch.zeros(rows, columns, dtype=torch.bool, device="cpu").scatter(1, drawn, True)
    table = table.to(device or torch.get_default_device())

    def random_blocks(b, h, q_idx, kv_idx):
        return table[q_idx // block, kv_idx // block]

    return random_blocks


def bigbird(
    length: int,
    block: int,
    window_blocks: int = 3,
    global_blocks: int = 1,
    drawn_blocks: int = 3,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> MaskMod:
    """The blocks around the query's own, the first blocks, and blocks drawn by `seed`.

    `length` and `block` are in tokens, the three counts in blocks of `block` tokens. The window
    is centred, so its count is odd. The kinds may overlap: a row sees at most their sum.
    Example: `bigbird(4096, 64)` shows a query at most 7 * 64 keys (the first 64 see all).
    Source: BigBird (2020).
    """
    block, radius = whole("block", block), whole("window_blocks", window_blocks) // 2
    if window_blocks % 2 == 0:
        raise ArgumentError(f"window_blocks must be odd, got {window_blocks}")
    head = whole("global_blocks", global_blocks, 0) * block
    drawn = random_blocks(length, length, block, drawn_blocks, seed, device)

    def bigbird(b, h, q_idx, kv_idx):
        apart = torch.abs(q_idx // block - kv_idx // block)
        fixed = (apart <= radius) | (q_idx < head) | (kv_idx < head)
        return fixed | drawn(b, h, q_idx, kv_idx)

    return bigbird
